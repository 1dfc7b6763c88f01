"""MARS inside vLLM: a plug-in that decodes several tokens per step, for vLLM's model runner V2.

The files here are plain torch and Python, and need no vLLM. `runner` holds the subclasses of vLLM's classes.
"""
