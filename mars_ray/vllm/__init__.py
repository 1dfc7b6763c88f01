"""MARS inside vLLM: a plug-in that decodes several tokens per step, for the model runner V2 of vLLM 0.32 and 0.33.

The files here are plain torch and Python, and need no vLLM. `runner` holds the subclasses of vLLM's classes.
"""
