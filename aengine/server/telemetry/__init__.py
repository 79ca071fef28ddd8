"""What operators see: logs, the access log, metrics. Fed by the records of `aengine.server.core`."""
