"""Run `lm-eval`, the command of lm-evaluation-harness, with our model registered: `python -m mars_ray.harness`."""

from mars_ray.harness import register
from mars_ray.program import run_program


def main() -> None:
    """Run `lm-eval`, and report an error of mars-ray as one line and an exit code."""
    run_program("mars-ray", _evaluate)


def _evaluate() -> None:
    register()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
