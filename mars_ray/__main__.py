"""`python -m mars_ray` is `mars-ray`."""

from mars_ray.cli.main import main

main()
