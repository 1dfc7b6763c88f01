"""Actors of Ray Data that can be started again (shell)."""

from operator import attrgetter

from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator


def pass_arguments_by_value() -> None:
    """Have Ray Data hand the actors of its pools their arguments themselves, for they are small.

    It hands them references into the object store. Ray cannot start an actor again once what they refer to is lost,
    and says so in a line at every start.
    """
    ActorPoolMapOperator._map_transformer_ref = property(attrgetter("_map_transformer"))
    ActorPoolMapOperator._data_context_ref = property(attrgetter("data_context"))
