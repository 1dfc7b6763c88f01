"""Run the command `mars-ray` as `python -m mars_ray`."""

from mars_ray.cli.main import main

main()
