"""Samples of a server's `/metrics`, as tests want them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def instance_infos(exposition: str) -> dict[str, dict[str, object]]:
    """By the name of each instance that runs: the labels of its info, and `kv_bytes`."""
    infos: dict[str, dict[str, object]] = {}
    families = {family.name: family for family in text_string_to_metric_families(exposition)}
    for sample in families["phasewise_instance_info"].samples:
        infos[sample.labels["instance"]] = dict(sample.labels)
    for sample in families["phasewise_instance_kv_bytes"].samples:
        if sample.labels["instance"] in infos:
            infos[sample.labels["instance"]]["kv_bytes"] = sample.value
    return infos
