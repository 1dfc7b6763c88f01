"""How heavy the load of each class of service is, judged by its share and its priority."""

from collections.abc import Mapping

from mars_ray.control.settings import ControlPlan


def fair_loads(plan: ControlPlan, requests: Mapping[str, float]) -> dict[str, float]:
    """Return for each class the load there would be if all of its priority used what there is as it does.

    It is at most what there is; classes of lower priority do not count.
    """
    loads = {}
    for each in plan.classes:
        peers = [other for other in plan.classes if other.priority == each.priority]
        above = sum(requests.get(other.name, 0.0) for other in plan.classes if other.priority > each.priority)
        alike = requests.get(each.name, 0.0) * sum(other.share for other in peers) / each.share
        loads[each.name] = above + min(alike, sum(requests.get(other.name, 0.0) for other in peers))
    return loads
