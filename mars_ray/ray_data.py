"""Public names for a stage in a user's Ray Data pipeline; see `build_processor`."""

from mars_ray.batch.ray.processor import Processor, build_processor
from mars_ray.batch.run.endpoint_config import EndpointProcessorConfig
from mars_ray.batch.run.processor_config import ProcessorConfig

__all__ = ["EndpointProcessorConfig", "Processor", "ProcessorConfig", "build_processor"]
