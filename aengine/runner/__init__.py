"""The runner: device state per row, and the execution of plans. Knows nothing of requests, queues or streams."""
