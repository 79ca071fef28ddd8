"""The boundary of a call: the port, who may call, how a call runs and ends, and what its errors become. Knows no method by name."""
