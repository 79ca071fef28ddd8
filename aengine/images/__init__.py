"""Images in prompts: files become pixels in a process that can do nothing else (`decoder.py`), pixels become what a prompt says of an image
(`processor.py`) and what the model computes with (`tower.py`), in a thread of their own, once for each image (`encoder.py`); a prompt and
its images become a request (`prompts.py`).
"""
