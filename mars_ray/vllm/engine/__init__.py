"""vLLM behind the interface of this package's engine: requests in, chunks out, state for the controller.

Our waiting queue stays in front, so classes, shares and refusals are the same with both engines; vLLM gets only as many
sequences as it may run at once. Only `llm_engine` imports vLLM.
"""
