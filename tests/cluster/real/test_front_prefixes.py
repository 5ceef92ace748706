"""The front and the prefixes that instances say they hold: who gets a request, and what is told of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phasewise.cluster.real.instance_messages import Ready
from phasewise.cython_kernels.kv_formats import kv_slot_bytes
from phasewise.serving.engine.messages import Answer, Delivery, EngineLoad, Submit
from phasewise.serving.http.monitoring.metrics import Gauges, Metrics
from phasewise.serving.ranks.kv_share import KvPlace
from phasewise.serving.scheduling.held_prefixes import BLOCK_TOKENS, HeldReport, block_keys
from tests.cluster.real.test_front import with_kv_target
from tests.support.servers.metric_lines import instance_infos
from tests.support.servers.scripted_instances import (
    IDENTITY,
    LOAD,
    ScriptedInstance,
    ScriptedServer,
    scripted_front,
)

PROMPT = tuple(range(6 * BLOCK_TOKENS + 9))
KEYS = block_keys(PROMPT, IDENTITY.model_hash, "")
OTHER = tuple(range(1000, 1300))
REPLICAS = ("mixed", "mixed")


def holds(
    server: ScriptedServer, instance: ScriptedInstance, keys: tuple[int, ...] = KEYS, number: int = 1
) -> None:
    """The instance reports these, and the front has heard it."""
    instance.say(Delivery((), None, LOAD, held=HeldReport(number, keys)))
    server.wait_until(lambda: server.front._router.n_blocks(instance.index) >= len(keys))


def taken_by(server: ScriptedServer, instances: list[ScriptedInstance], request: Submit) -> int:
    """The number of the instance that gets it."""
    server.front.send(request)
    for _ in range(1000):
        for instance in instances:
            if not instance.hears_nothing(0.01):
                assert instance.hear(Submit).prompt_token_ids == request.prompt_token_ids
                return instance.index
    raise AssertionError("nobody was told")


@pytest.mark.parametrize(("policy", "chosen"), [("prefix-aware", 1), ("splitwise", 0)])
def test_a_request_goes_where_its_beginning_is_held(policy: str, chosen: int) -> None:
    with scripted_front(REPLICAS, policy=policy) as server:
        instances = server.running()
        holds(server, instances[1])

        assert taken_by(server, instances, Submit("r", PROMPT, 8)) == chosen


def test_another_key_or_adapter_has_another_beginning() -> None:
    """Nor one whose prompt is scored: all of it is computed."""
    identity = replace(IDENTITY, adapters={"style": "12" * 32})
    with scripted_front(REPLICAS) as server:
        instances = [server.launcher.next() for _ in REPLICAS]
        for instance in instances:
            instance.ready(identity)
        server.wait_until_state("running")
        holds(server, instances[1])

        for name, fields in enumerate(({"cache_space": "key"}, {"adapter": "style"}, {"prompt_logprobs": 0})):
            request = Submit(str(name), PROMPT, 8, **fields)  # type: ignore[arg-type]
            assert taken_by(server, instances, request) == 0
            instances[0].tell(Answer(f"{name}@{name + 1}", "", (), 1, 5, "length"))
            server.next_out()


def test_a_hot_beginning_spreads_when_its_instance_is_busy() -> None:
    with scripted_front(REPLICAS) as server:
        instances = server.running()
        holds(server, instances[1])

        taken = [taken_by(server, instances, Submit(f"r{number}", PROMPT, 8)) for number in range(120)]

        assert taken[0] == 1
        assert set(taken) == {0, 1}


def test_what_an_instance_forgets_or_loses_with_its_life_is_forgotten() -> None:
    with scripted_front(REPLICAS) as server:
        instances = server.running()
        holds(server, instances[1])
        instances[1].say(Delivery((), None, LOAD, held=HeldReport(2, (), KEYS)))
        server.wait_until(lambda: server.front._router.n_blocks(1) == 0)
        assert taken_by(server, instances, Submit("a", PROMPT, 8)) == 0

        holds(server, instances[1], number=3)
        other = server.replaced(instances[1])
        other.ready()
        other.say(Delivery((), None, LOAD, held=HeldReport(1)))
        server.wait_until(lambda: server.front._router.n_blocks(1) == 0)


def test_a_report_that_cannot_be_true_is_refused_and_its_instance_goes_on() -> None:
    """It is routed to by its load; `/metrics` counts the refusal."""
    with scripted_front(REPLICAS) as server:
        instances = server.running()
        instances[1].say(
            Delivery((), None, LOAD, held=HeldReport(1, tuple(range(4000))))
        )  # room for 16, and 2048 on disk
        server.wait_until(lambda: server.front.instances()[1].reports_refused == 1)
        instances[1].say(Delivery((), None, LOAD, held=HeldReport(2, KEYS)))

        taken = [taken_by(server, instances, Submit(str(number), PROMPT, 8)) for number in range(2)]

        assert (taken[0], server.front.state) == (0, "running")
        assert server.front._router.n_blocks(1) == 0
        text = Metrics(Gauges(instances=server.front.instances)).exposition().decode()
        line = 'phasewise_instance_prefix_reports_refused_total{instance="mixed-1",role="mixed"} 1.0'
        assert line in text.splitlines()


def test_metrics_have_each_instance() -> None:
    """Its queue, slots and tokens as it told them, what was routed to it, and what it handed over."""
    with scripted_front() as server:
        prompt, token, attempt = with_kv_target(server)
        load = EngineLoad(3, 2, 640, 1024, prefix_tokens_reused=77, prompt_token_ns=2.5e6)
        prompt.say(Delivery((), None, load, computed=(attempt,), held=HeldReport(1, KEYS)))
        server.wait_until(lambda: server.front._router.n_blocks(0) == len(KEYS))
        token.tell(Answer(attempt, "a", (), 1, 5), arrived=[attempt])
        server.next_out()

        lines = Metrics(Gauges(instances=server.front.instances)).exposition().decode().splitlines()

    told = {
        "ready": 1,
        "requests_waiting": 3,
        "requests_running": 2,
        "kv_slots_used": 640,
        "kv_slots": 1024,
        "prompt_token_seconds": 0.0025,
        "prefix_tokens_held": len(KEYS) * BLOCK_TOKENS,
        "prefix_tokens_reused_total": 77,
        "prompts_total": 1,
        "prompt_tokens_total": 100,
        "answers_total": 0,
        "pool_changes_total": 0,
        "hand_overs_total": 1,
        "hand_over_bytes_total": 100 * 2 * kv_slot_bytes("f16", 4),  # of two layers
        "restarts_total": 0,
    }
    for name, value in told.items():
        line = f'phasewise_instance_{name}{{instance="prompt-0",role="prompt"}} {float(value)}'
        assert line in lines, name
    assert 'phasewise_instance_answers_total{instance="token-1",role="token"} 1.0' in lines
    assert 'phasewise_instance_pool{instance="token-1",pool="token",role="token"} 1.0' in lines


def test_metrics_tell_how_each_instance_runs() -> None:
    """Its node, storage of weights, plans and memory; an instance that is gone has no such line."""
    plans = ("prefill: 1 rank on core 0 (database)", "decode: 2 ranks on cores 0 | 1 (default)", "odd")
    with scripted_front() as server:
        prompt, token = (server.launcher.next() for _ in range(2))
        for instance, kv_bytes in ((prompt, 1 << 20), (token, 1 << 30)):
            place = KvPlace("/proc/1/fd/1", 1, 0, 1024)
            facts = (1, "here", 64, instance.orders.listen, place, plans, kv_bytes, (0, 1), 7)
            instance.say(Ready(IDENTITY, *facts))
        server.wait_until_state("running")
        server.launcher.labels[1] = "phasewise=small"
        infos = info_of(server)
        token.ended = "it was killed"
        again = server.launcher.next()
        left = info_of(server)

    assert again.index == 1
    assert infos["prompt-0"] == {
        "instance": "prompt-0",
        "role": "prompt",
        "node": "host-0",
        "label": "",
        "format": "native",
        "kv_format": "f16",
        "sparse_weights": "7",
        "prefill_plan": "1 rank on core 0 (database)",
        "decode_plan": "2 ranks on cores 0 | 1 (default)",
        "kv_bytes": float(1 << 20),
    }
    assert infos["token-1"]["label"] == "phasewise=small"
    assert infos["token-1"]["kv_bytes"] == float(1 << 30)
    assert left == {"prompt-0": infos["prompt-0"]}


def info_of(server: ScriptedServer) -> dict[str, dict[str, object]]:
    return instance_infos(Metrics(Gauges(instances=server.front.instances)).exposition().decode())


def test_one_engine_has_no_metrics_of_instances() -> None:
    assert "phasewise_instance" not in Metrics(Gauges()).exposition().decode()
