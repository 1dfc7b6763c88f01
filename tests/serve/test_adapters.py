"""An endpoint with several adapters: each is a model that callers name, and all answer as the base does."""

from pathlib import Path

import openai
import pytest

from mars_ray.errors import ConfigError
from mars_ray.installed import settings_class
from mars_ray.serve.deploy.deploy_file import read_deploy_file
from tests.serve.adapter_samples import saved_adapter
from tests.serve.endpoint_samples import config_of, served


def test_openais_client_finds_each_adapter_as_a_model_and_gets_the_words_of_the_base(tmp_path: Path) -> None:
    adapters = {name: saved_adapter(tmp_path / name, rank) for name, rank in (("chat", 3), ("code", 8))}
    with served(config_of(adapters=adapters, mode="exact")) as endpoint:
        client = openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="none")
        names = [model.id for model in client.models.list()]
        assert names == ["bundled", "chat", "code"]
        assert client.models.retrieve("code").id == "code"
        prompt = "Diana, Rita, Grace: put them in a numbered list."
        said = [
            client.chat.completions.create(model=name, messages=[{"role": "user", "content": prompt}], max_tokens=40)
            for name in names
        ]
        assert [each.model for each in said] == names
        assert len({each.choices[0].message.content for each in said}) == 1
        with pytest.raises(openai.NotFoundError, match="Available: 'bundled', 'chat', 'code'"):
            client.completions.create(model="other", prompt="a")


def test_adapters_on_the_command_line_have_a_name_or_are_for_all_requests(tmp_path: Path) -> None:
    def args(*given: str) -> dict[str, object]:
        found: dict[str, object] = read_deploy_file(settings_class(), None, adapters=given)["applications"][0]["args"]
        return found

    assert args(str(tmp_path))["adapter"] == str(tmp_path)
    (run := tmp_path / "lr=1e-4").mkdir()
    assert args(str(run))["adapter"] == str(run)
    several = args(f"a={tmp_path}", "b=org/name", "org/plain")
    assert (several["adapter"], several["adapters"]) == ("org/plain", {"a": str(tmp_path), "b": "org/name"})


@pytest.mark.parametrize("given", [["x", "y"], ["a=x", "a=y"], ["=x"], ["a="]], ids=str)
def test_adapters_that_cannot_be_told_apart_are_refused(given: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--adapter .*: give DIR once"):
        read_deploy_file(settings_class(), None, adapters=given)


def test_no_adapter_has_the_name_of_the_model() -> None:
    with pytest.raises(ConfigError, match="'bundled' names two models or adapters"):
        config_of(adapters={"bundled": "somewhere"})
