"""What the policy does to thresholds reaches the audit log at a bounded rate, whole and with its cause."""

from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mars_ray.control.core.policy_changes import EVERY_S, PolicyChange, PolicyChanges


@dataclass
class Heard:
    now_s: float = 0.0
    events: list[tuple[float, PolicyChange]] = field(default_factory=list)

    def __call__(self, change: PolicyChange) -> None:
        self.events.append((self.now_s, change))


def change(before: float, after: float, load: float | None = 0.5, name: str = "gold") -> PolicyChange:
    return PolicyChange(
        service_class=name,
        before=before,
        after=after,
        lowest=after,
        changes=1,
        reason=f"for {after:g}",
        load=load,
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["gold", "batch"]),
            st.sampled_from([0.0, 1.0, 20.0, 61.0]),
            st.floats(0, 1),
            st.one_of(st.none(), st.floats(0, 9)),
        )
    )
)
def test_every_change_is_in_one_event_and_events_are_seldom(
    steps: list[tuple[str, float, float, float | None]],
) -> None:
    heard = Heard()
    changes = PolicyChanges(heard)
    thresholds = {"gold": 1.0, "batch": 1.0}
    made: dict[str, list[PolicyChange]] = {"gold": [], "batch": []}
    for name, seconds, after, load in steps:
        heard.now_s += seconds
        made[name].append(change(thresholds[name], after, load, name))
        changes.add(made[name][-1])
        thresholds[name] = after
        changes.report(heard.now_s)
    heard.now_s += EVERY_S
    changes.report(heard.now_s)
    for name, single in made.items():
        events = [(at_s, event) for at_s, event in heard.events if event.service_class == name]
        assert all(later_s - earlier_s >= EVERY_S for (earlier_s, _), (later_s, _) in pairwise(events))
        assert sum(event.changes for _, event in events) == len(single)
        begin = 0
        for _, event in events:
            joined = single[begin : begin + event.changes]
            begin += event.changes
            assert (event.before, event.after) == (joined[0].before, joined[-1].after)
            assert event.lowest == min(part.after for part in joined)
            assert event.reason == f"for {event.lowest:g}"
            assert event.load == max((part.load for part in joined if part.load is not None), default=None)


def test_the_cause_has_reason_and_load() -> None:
    assert change(1, 0.8, 1.42).cause == "for 0.8; demand is 142% of the capacity at full quality"
    assert change(1, 0.8, None).cause == "for 0.8"
