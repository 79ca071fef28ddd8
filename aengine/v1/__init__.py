"""Generated from protos/aengine/v1 by tools/generate.py; edit those files instead."""
