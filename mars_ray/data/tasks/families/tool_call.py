"""Task: answer a request with a call of a tool, in the form of Hermes and Qwen, or without one where no tool fits.

An example is a conversation: a system message that lists one to four tools, a request, and perhaps a call with its
result. List and result have the words of the bundled model's chat template, so an endpoint renders `tools` and `role:
tool` to the same text, and models whose template knows neither can still be asked.
"""

import json
import random
from collections.abc import Mapping

from mars_ray.data.tasks.checks import same_json, same_text
from mars_ray.data.tasks.families.rewriting import DATE_REWRITE, LIST_FORMAT, TABLE_TO_TEXT
from mars_ray.data.tasks.family import Family, TaskExample
from mars_ray.data.tasks.functions import FUNCTIONS, PARAMETERS, CatalogFunction, Tool, Value
from mars_ray.data.tasks.lexicon import CITIES, FIRST_NAMES

NO_TOOL = "I have no tool for that."
"""The answer to a request for a function that is not offered."""

_TOOLS = (1, 1, 2, 2, 3, 4)
"""Numbers of tools to draw from; few, because most of an example's tokens describe tools."""

_BEGIN = "<tool_call>\n"
_END = "\n</tool_call>"

# A name next to the request makes requests with few arguments differ. It is no argument.
_WRAPPERS = ("{request}", "This is {name}. {request}", "{request} Thanks, {name}.", "{name}, {city}: {request}")

_OTHER_FAMILIES = (DATE_REWRITE, LIST_FORMAT, TABLE_TO_TEXT)


def _make(rng: random.Random) -> TaskExample:
    functions = rng.sample(FUNCTIONS, rng.choice(_TOOLS) + 1)
    wanted = functions[0]
    kind = rng.random()
    # The first function is the wanted one; it is not offered to requests that no tool fits.
    offered = functions[1:] if kind < 0.2 else functions[:-1]
    tools = {function: _tool(function, rng) for function in offered}
    shown = list(tools.values())
    rng.shuffle(shown)
    if kind < 0.1:
        other = rng.choice(_OTHER_FAMILIES).make(rng)
        return _example(shown, other.prompt, other.response)
    request, values = _request(wanted, rng)
    if kind < 0.2:
        return _example(shown, request, NO_TOOL)
    call = _call(wanted, tools[wanted], values)
    if kind < 0.85:
        return _example(shown, request, _BEGIN + call + _END, answer=call)
    texts = values | {"value": rng.randint(2, 99)}
    after = (
        {"role": "assistant", "content": _BEGIN + call + _END},
        {"role": "user", "content": f"<tool_response>\n{wanted.result.format(**texts)}\n</tool_response>"},
    )
    return _example(shown, request, wanted.sentence.format(**texts), after=after)


def _example(
    tools: list[Tool], prompt: str, response: str, *, answer: str | None = None, after: tuple[dict[str, str], ...] = ()
) -> TaskExample:
    system = "Tools:\n" + "\n".join(map(_signature, tools))
    return TaskExample(
        family="tool_call",
        prompt=prompt,
        response=response,
        answer=answer or response,
        tools=tuple(tools),
        before=({"role": "system", "content": system},),
        after=after,
    )


def _tool(function: CatalogFunction, rng: random.Random) -> Tool:
    """Return the function with names drawn for itself and its parameters."""
    names = {key: rng.choice(PARAMETERS[key].names) for key in function.parameters}
    optional = {key for key in names if any("{" + key + "}" not in request for request in function.requests)}
    return {
        "name": rng.choice(function.names),
        "description": function.description,
        "parameters": {
            "type": "object",
            "properties": {name: dict(PARAMETERS[key].schema) for key, name in names.items()},
            "required": [name for key, name in names.items() if key not in optional],
        },
    }


def _signature(tool: Tool) -> str:
    """Return the line by which the chat template describes a tool."""
    parameters = tool["parameters"]
    described = ", ".join(
        f"{name}{'' if name in parameters['required'] else '?'}: {'|'.join(schema.get('enum', [schema['type']]))}"
        for name, schema in parameters["properties"].items()
    )
    return f"{tool['name']}({described}): {tool['description']}"


def _request(function: CatalogFunction, rng: random.Random) -> tuple[str, dict[str, Value]]:
    """Return the text of a request, and the values of the parameters that it mentions."""
    drawn = {key: rng.choice(PARAMETERS[key].values) for key in function.parameters}
    request = rng.choice(function.requests)
    values = {key: value for key, value in drawn.items() if "{" + key + "}" in request}
    spoken = {key: PARAMETERS[key].spoken.get(value, value) for key, value in values.items()}
    wrapper = rng.choice(_WRAPPERS)
    name = rng.choice(FIRST_NAMES)
    return wrapper.format(request=request.format(**spoken), name=name, city=rng.choice(CITIES)), values


def _call(function: CatalogFunction, tool: Tool, values: Mapping[str, Value]) -> str:
    """Return the name and the arguments of a call as JSON."""
    named = zip(function.parameters, tool["parameters"]["properties"], strict=True)
    arguments = {name: values[key] for key, name in named if key in values}
    return json.dumps({"name": tool["name"], "arguments": arguments})


def _verify(answer: str, text: str) -> bool:
    """Return whether the text is one call with the answer's name and arguments, or the text of the answer."""
    if not answer.startswith("{"):
        return same_text(answer, text)
    call = text.strip()
    return call.startswith(_BEGIN) and call.endswith(_END) and same_json(answer, call[len(_BEGIN) : -len(_END)])


TOOL_CALL = Family(name="tool_call", kind="easy", weight=0.0, make=_make, verify=_verify)
