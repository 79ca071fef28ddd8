"""What both doors share: who may call, how a generation is opened and ends, errors, records. Knows neither gRPC nor HTTP."""
