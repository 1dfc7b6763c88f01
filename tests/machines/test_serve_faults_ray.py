"""What befalls an endpoint on three machines while callers ask: all are answered, and it is whole again by itself."""

import pytest

from tests.machines.endpoint import Endpoint, start_endpoint
from tests.machines.faults import ENGINE, REPLICA, asking, seen, until
from tests.machines.machines import Machine

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
ENGINES = 2


@pytest.fixture(scope="module")
def endpoint(nodes: list[Machine]) -> Endpoint:
    return start_endpoint(nodes, gateways=3, engines=ENGINES)


def test_callers_of_an_engine_that_hangs_are_answered_by_the_others_and_it_is_replaced(endpoint: Endpoint) -> None:
    until(lambda: len(seen(endpoint)) == ENGINES)
    before = seen(endpoint)
    lost = next(each for each in endpoint.nodes[1:] if each.processes(REPLICA))
    with asking(endpoint, endpoint.nodes, 60) as asked:
        lost.run("pkill", "-STOP", "-f", ENGINE)
        whole_s = until(lambda: len(seen(endpoint)) == ENGINES and seen(endpoint) != before)
    print(f"\nan engine hangs: {asked}; two engines after {whole_s:.0f} s")
    assert not asked.failed
