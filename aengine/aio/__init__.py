"""Event loops: from another loop or thread into one, starting and closing once, and an engine of asyncio in trio."""
