"""The history of the replicas: what each frame says, and that it stays within bounds."""

import math

from mars_ray.control.core.controller import Controller
from mars_ray.control.core.live_view import FIGURES, FRAMES, STEP_S, FrameHistory
from mars_ray.control.core.status import ReplicaStatus
from tests.control.control_samples import class_state, engine_state, plan_of, report


def replica(tokens: int, name: str = "a") -> ReplicaStatus:
    state = engine_state(class_state(running=2, waiting=3, tokens=tokens, threshold=0.9))
    return ReplicaStatus(replica=name, age_s=0.0, state=state)


def figures(history: FrameHistory) -> dict[str, float]:
    return dict(zip(FIGURES, history.after(0)[-1].values_RF[0].tolist(), strict=True))


def test_a_frame_says_what_a_replica_does_and_tokens_are_those_since_the_frame_before() -> None:
    history = FrameHistory()
    history.observe([replica(100)], 0.0, 1000.0)
    assert math.isnan(figures(history)["tokens_s"])
    history.observe([replica(400)], STEP_S, 1005.0)
    now = figures(history)
    assert (now["tokens_s"], now["load"], now["queue"]) == (300 / STEP_S, 0.5, 3.0)
    assert now["tokens_per_forward"] > 1.0
    history.observe([replica(0)], 2 * STEP_S, 1010.0)  # another engine under the same name
    assert figures(history)["tokens_s"] == 0.0


def test_frames_come_every_step_and_the_oldest_go() -> None:
    history = FrameHistory()
    for second in range(int(STEP_S) * (FRAMES + 10)):
        history.observe([replica(second)], float(second), float(second))
    kept = history.after(0)
    assert [each.number for each in kept] == list(range(11, FRAMES + 11))
    assert history.after(FRAMES + 9) == kept[-1:]


def test_who_knows_another_life_of_the_controller_gets_all_frames_of_this_one() -> None:
    controller = Controller(plan_of(), clock=iter(map(float, range(10**6))).__next__)
    for number in range(1, 40):
        controller.handle_report(report(number, float(number)))
    first = controller.live("", 0)
    assert len(first.frames) > 2
    assert controller.live(first.controller, first.frames[-2].number).frames == first.frames[-1:]
    assert controller.live("another", 1000).frames == first.frames


def test_the_curve_says_what_every_threshold_would_give_and_how_much_of_it_is_asked_for() -> None:
    controller = Controller(plan_of(), clock=iter(map(float, range(10**6))).__next__)
    for number in range(1, 20):
        state = class_state(arrived=10 * number, prompt_tokens=200 * number, ended=9 * number, tokens=600 * number)
        controller.handle_report(report(number, float(number), state))
    curve = controller.status().curve
    assert [each.threshold for each in curve] == sorted((each.threshold for each in curve), reverse=True)
    assert curve[0].threshold == 0.95
    assert curve[-1].tokens_s > curve[0].tokens_s
    assert 0 < curve[-1].demand < curve[0].demand
