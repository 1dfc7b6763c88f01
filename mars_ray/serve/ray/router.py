"""Route requests from a gateway to the engines by load and shared prefix (shell around `prefix_routing`)."""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from mars_ray.engine.request import Request
from mars_ray.serve.replicas.heard import HEARD
from mars_ray.serve.replicas.prefix_routing import prefix_key, ranked


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Routes by the engine request that a call carries; calls without one go to the least loaded replica."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return ranks of one replica each; Ray takes the first that has room."""
        if pending_request:
            # All replicas that answer are among the ranks. Unless told so, Ray asks again at once, without a pause.
            pending_request.routing_context.should_backoff = True
        request = next(iter(pending_request.args), None) if pending_request else None
        key = prefix_key(request.tenant, request.prompt) if isinstance(request, Request) else ""
        by_id = {each.replica_id.unique_id: each for each in candidate_replicas}
        by_id = {name: each for name, each in by_id.items() if not HEARD.silent(name)} or by_id
        loads = {name: self.replica_queue_len_cache.get(each.replica_id) or 0 for name, each in by_id.items()}
        return [[by_id[name]] for name in ranked(key, loads)] if loads else []
