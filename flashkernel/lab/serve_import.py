"""Loads that another engine has served: its own results files as records, its version, and rates that follow from its
best throughput."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flashkernel.lab import results
from flashkernel.lab.serve_records import ServeRecord
from flashkernel.lab.serving import LOADS, PASSES, Load

ASK_S = 5.0
SAME = 0.02  # how far tokens/s of a file may be from its seconds and the load's tokens, both rounded


def read_peer_file(
    path: Path, model: str, implementation: str, dtype: str, version: str | None, **options: Any
) -> list[ServeRecord]:
    """Records of a JSON file with the entries of `entry_records`; its date is that of the file, unless it says one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: it cannot be read ({error})") from error
    entries = found if isinstance(found, Mapping) else {}
    changed = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).isoformat(timespec="seconds")
    facts = {"model": model, "implementation": implementation, "dtype": dtype, "source": path.name, **options}
    return entry_records(entries, version, changed, **facts)


def entry_records(
    entries: Mapping[str, Any], version: str | None, date: str, implementation: str, source: str, **facts: Any
) -> list[ServeRecord]:
    """Records of entries such as `"chat, first": {"s": 12.3, "out_tokens_per_s": 17012.0}`.

    The loads must be LOADS, all at once, with lengths drawn as `Load.named` draws them. `"start_s"`, `"version"` and
    `"date"` are read where there are. Other entries are other measurements. `facts` are further fields of the records,
    such as `quantization`.

    Raises:
        ValueError: There are no such entries, or none of these loads, or nobody says which version it was.
    """
    version = version or entries.get("version")
    if version is None:
        raise ValueError(f"{source}: it does not say which version of {implementation} it is of; give --peer-version")
    facts |= {
        "implementation": implementation, "kind": "baseline", "version": version,
        "date": entries.get("date", date), "source": source, "start_s": entries.get("start_s"),
    }  # fmt: skip
    records = [
        _record(source, load, pass_name, entries[f"{load}, {pass_name}"], facts)
        for load in LOADS
        for pass_name in PASSES
        if f"{load}, {pass_name}" in entries
    ]
    if not records:
        raise ValueError(
            f'{source}: it has none of the loads {", ".join(LOADS)}; an entry is "chat, first": '
            '{"s": seconds, "out_tokens_per_s": tokens}'
        )
    return records


def _record(source: str, load: str, pass_name: str, entry: Any, facts: Mapping[str, Any]) -> ServeRecord:
    try:
        seconds, speed = float(entry["s"]), float(entry["out_tokens_per_s"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{source}: {load}, {pass_name} has no s and out_tokens_per_s ({error!r})") from error
    lengths = Load.named(load).lengths
    tokens = sum(answer for _, answer in lengths)
    if seconds <= 0 or abs(speed * seconds / tokens - 1) > SAME:
        raise ValueError(
            f"{source}: {load}, {pass_name} has {speed * seconds:.0f} tokens in {seconds:g} s, and the load has "
            f"{tokens}; the file was made with other loads"
        )
    return ServeRecord(
        load=load, pass_name=pass_name, requests=len(lengths), rate=None, seconds=seconds, out_tokens=tokens,
        out_tokens_per_s=speed, requests_per_s=len(lengths) / seconds, **facts,
    )  # fmt: skip


def add_to_file(path: Path, records: list[ServeRecord], header: Mapping[str, Any]) -> list[Any]:
    """Puts records of another engine into a results file, for their keys; returns all that it then has.

    The header stays what it is: it describes our own runs. `header` is that of a new file.
    """
    before = results.load(path) if path.exists() else {**header, "records": []}
    new = {record.key for record in records}
    kept = [record for record in before["records"] if record.key not in new]
    results.write(path, {**before, "records": kept + records})
    return kept + records


def check_server(base_url: str, model: str, api_key: str | None) -> None:
    """ValueError if the server there has not OpenAI's API, or does not serve `model`."""
    try:
        found = json.loads(_get(f"{base_url.rstrip('/')}/models", api_key))
        names = [one["id"] for one in found["data"]]
    except urllib.error.HTTPError as error:
        advice = {401: "give its --api-key", 404: "its path mostly ends in /v1"}.get(error.code, "look at its log")
        raise ValueError(f"bench serve: {base_url} answers with status {error.code}; {advice}") from error
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"bench serve: {base_url} is no server of HTTP ({error})") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"bench serve: {base_url} has no list of models, as OpenAI's API has ({error})") from error
    if model not in names:
        raise ValueError(f"bench serve: {base_url} serves {', '.join(names)}, not {model}; give --served-model-name")


def server_version(base_url: str) -> str | None:
    """What a server says at /version; None if it says nothing."""
    try:
        found = json.loads(_ask(base_url, "version")).get("version")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def engine_counts(base_url: str, api_key: str | None) -> dict[str, int]:
    """What our own server says at /metrics of kernels compiled at its start and in service; {} if it says nothing."""
    try:
        text = _ask(base_url, "metrics", api_key)
    except OSError:
        return {}
    found = re.findall(r"^flashkernel_(compiled_at_start|compiled_in_service) (\S+)$", text, re.MULTILINE)
    return {name: int(float(value)) for name, value in found}


def _ask(base_url: str, page: str, api_key: str | None = None) -> str:
    return _get(f"{base_url.rstrip('/').removesuffix('/v1')}/{page}", api_key)


def _get(url: str, api_key: str | None) -> str:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=ASK_S) as answer:
        return answer.read().decode()  # type: ignore[no-any-return]


def share_of_best(records: Iterable[ServeRecord], implementation: str, model: str, load: str, share: float) -> float:
    """Requests a second that are this share of the most that an implementation served when all came at once.

    Three digits, so that whoever is measured at the rate has the same; ValueError if it was not measured.
    """
    speeds = [
        record.requests_per_s
        for record in records
        if (record.implementation, record.model, record.load) == (implementation, model, load)
        and record.rate is None
        and record.comparable
    ]
    if not speeds:
        raise ValueError(
            f"bench serve: the results have no load {load!r} of {model} that {implementation} served all at once, so "
            "there is no throughput to take a share of; measure it (--base-url, --implementation) or --import it first"
        )
    return float(f"{share * max(speeds):.3g}")
