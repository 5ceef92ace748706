"""`phasewise models`: fetch, list, remove and inspect models."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasewise._options import REQUIRED, argument, option, refuse_unused
from phasewise._words import counted, number, percent
from phasewise.cli.command_app import CommandApp
from phasewise.cli.options import JsonOption, ModelArgument, complete_name
from phasewise.cli.present import note, on_one_line
from phasewise.cli.tables import present
from phasewise.serving.models.storage_modes import SparseMode
from phasewise.workflows.options import FORMAT, SPARSE

if TYPE_CHECKING:
    from phasewise.serving.loaders.inspection import Inspection, Removed, WeightDensity
    from phasewise.serving.models.packed_model import ModelConfig


HELP = """Fetch models, list, pack and remove them, look inside one.

$ phasewise models list
$ phasewise models inspect model.gguf"""

app = CommandApp(help=HELP)

LABEL_COLUMNS = 16
NAME_COLUMNS = 22


@app.command()
def pull(
    model: str = argument(
        REQUIRED,
        "a known name, or a hub name such as org/name or org/name-GGUF:Q4_K_M",
        "MODEL",
        autocompletion=complete_name,
    ),
    as_json: JsonOption = False,
) -> None:
    """Fetch MODEL into the cache and print its path. A whole copy that is there is kept.

    $ phasewise pull smollm2-135m-instruct
    $ phasewise pull org/name-GGUF:Q4_K_M

    The same command resumes an interrupted download. Sizes and digests are checked.
    """
    from phasewise.cli.status_line import status_line
    from phasewise.serving.loaders.fetching.resolve import cache_root, fetch

    bar = DownloadBar()

    def progress(here: int, total: int) -> None:
        bar.saw(here, time.monotonic())
        line.show(lambda: bar.text(total))

    with status_line() as line:
        located = fetch(model, cache_root(), line.say, progress)
    present(as_json, {"name": located.name, "path": str(located.path)}, [str(located.path)])


@app.command()
def pack(
    model: ModelArgument,
    output: Path = option(REQUIRED, "the file to write", "-o", "--output", metavar="FILE"),
    weight_format: str = FORMAT("native"),
    sparse: SparseMode = SPARSE("auto"),
    as_json: JsonOption = False,
) -> None:
    """Pack MODEL into FILE, which commands take as MODEL from then on, and print its path.

    $ phasewise models pack model.gguf -o model.packed
    $ phasewise serve model.packed

    For images, and hosts without a cache: FILE holds all that a start maps,
    without the source. Another version of phasewise may ask for a new one.
    """
    from phasewise.workflows.pack import pack as pack_model

    pack_model(model, weight_format, sparse, output, note)
    present(as_json, {"path": str(output), "file_bytes": output.stat().st_size}, [str(output)])


@app.command("list")
def list_models(as_json: JsonOption = False) -> None:
    """List the known models, those that are here, and what is packed from them and others.

    $ phasewise models list
    $ phasewise models list --json
    """
    from phasewise.serving.loaders.fetching.resolve import cache_root
    from phasewise.serving.loaders.inspection import known_models, packed_models, stored

    root = cache_root()
    fetchable, here, packed = known_models(root), stored(root), packed_models(root)
    fields = {"cache": str(root), "models": fetchable, "stored": here, "packed": packed}
    present(as_json, fields, [list_text(fetchable, here, packed)])


@app.command("rm")
def remove(
    model: str = argument(
        REQUIRED,
        "a name that models list prints, or a file whose packed form goes",
        "MODEL",
        autocompletion=complete_name,
    ),
    packed: bool = option(False, "remove only what is packed, keep the model"),
    as_json: JsonOption = False,
) -> None:
    """Remove a fetched MODEL and what is packed from it. Files of your own are never removed.

    $ phasewise models rm smollm2-135m-instruct
    $ phasewise models rm model.gguf --packed
    """
    from phasewise.serving.loaders import inspection
    from phasewise.serving.loaders.fetching.resolve import cache_root

    _present(inspection.remove(model, cache_root(), packed_only=packed), as_json)


@app.command()
def prune(
    packed: bool = option(False, "remove every packed file; the next start of a model makes it anew"),
    dry_run: bool = option(False, "print what would go and remove nothing"),
    as_json: JsonOption = False,
) -> None:
    """Remove what no start will use: packed files without their model, parts of downloads, left-overs.

    $ phasewise models prune --dry-run
    $ phasewise models prune --packed
    """
    from phasewise.serving.loaders import inspection
    from phasewise.serving.loaders.fetching.resolve import cache_root

    _present(inspection.prune(cache_root(), all_packed=packed, dry_run=dry_run), as_json, dry_run)


def _present(removed: list[Removed], as_json: bool, dry_run: bool = False) -> None:
    """Print the removed files, a line for each, then the sum."""
    verb = "would remove" if dry_run else "removed"
    lines = [f"{verb} {size_text(file.n_bytes):>9}  {file.why}: {on_one_line(file.path)}" for file in removed]
    total = size_text(sum(file.n_bytes for file in removed))
    fields = {"dry_run": dry_run, "removed": removed}
    present(as_json, fields, [*lines, f"{verb} {total} in all"])


@app.command()
def inspect(
    model: ModelArgument,
    density: bool = option(False, "list the zeros of each weight; reads all of them"),
    weight_format: str = FORMAT("native"),
    as_json: JsonOption = False,
) -> None:
    """Show the shape of MODEL, its tensors by type, and the memory that each weight format takes.

    $ phasewise models inspect smollm2-135m-instruct
    $ phasewise models inspect model.gguf --density --format int8

    With --density, for each weight under --format: the share of its numbers
    that are not zero, its bytes stored dense and sparse, and from which share
    of zeros on it is stored sparse where nothing was measured.
    """
    if not density:
        refuse_unused("without --density", [] if weight_format == "native" else ["weight_format"])
    from phasewise.serving.loaders import head_place, inspection, open_head_source, open_source
    from phasewise.serving.loaders.fetching.resolve import cache_root, locate

    located = locate(model, cache_root(), note)
    with open_source(located) as source:
        place = head_place(source.config.architecture, source.name, located.path)
        with open_head_source(place) as head:
            inspected = inspection.inspect_source(source, head)
        zeros = inspection.densities(source, weight_format) if density else []
    fields = inspection.to_json(inspected) | ({"densities": zeros} if density else {})
    lines = [f"{label:<{LABEL_COLUMNS}}{on_one_line(value)}" for label, value in _facts(inspected)]
    present(as_json, fields, [*lines, *map(_density_line, zeros)])


def _density_line(weight: WeightDensity) -> str:
    sizes = f"{size_text(weight.dense_bytes)} dense, {size_text(weight.sparse_bytes)} sparse"
    return (
        f"{weight.name:<{NAME_COLUMNS}}{weight.form} {weight.n} x {weight.k}, "
        f"{percent(weight.density, 1)} kept, {sizes}; sparse from {percent(weight.break_even)} zeros on"
    )


def _facts(inspected: Inspection) -> list[tuple[str, str]]:
    """Facts of a model as pairs of a label and a value, one for each line of `inspect`."""
    config = inspected.config
    indexer = None if config.latent is None else config.latent.indexer
    chosen = f"chooses {counted(indexer.chosen, 'position')}" if indexer else ""
    experts, head = config.experts, "tied" if config.tied_embeddings else "separate"
    mixture = "" if experts is None else f", {experts.chosen} of {counted(experts.count, 'expert')}"
    scaling = "" if config.rope.scaling is None else f", scaled: {type(config.rope.scaling).__name__}"
    windows = {kind.window for kind in config.kinds if kind.window is not None}
    window, ends = f", window {_listed(tuple(windows))}" if windows else "", _listed(config.eos_token_ids)
    extras = [
        name for name, present in (("q/k norm", config.qk_norm), ("biases", inspected.has_bias)) if present
    ]
    facts = [
        ("model", inspected.name),
        ("source", f"{inspected.path}"),
        ("architecture", ", ".join([config.architecture, *extras])),
        ("layers", f"{config.n_layers} of hidden {config.hidden}, feed-forward {config.ffn}{mixture}"),
        ("heads", _heads(config)),
        *([("indexer", f"{counted(indexer.heads, 'head')} of {indexer.dim}, {chosen}")] if indexer else []),
        ("context", f"{counted(config.context_length, 'token')}{window}"),
        ("rope", f"theta {number(config.rope.theta)}{scaling}"),
        ("vocabulary", f"{counted(config.vocab_size, 'token')}, {head} head"),
        ("tokenizer", f"{inspected.tokenizer_kind}, BOS {config.bos_token_id}, EOS {ends}"),
        ("chat template", "none" if inspected.turns is None else "yes"),
        *((f"template's {part}", repr(written)) for part, written in (inspected.turns or {}).items()),
        ("parameters", f"{inspected.parameters / 1e6:.1f} M"),
    ]
    if config.state is not None:
        layers = counted(sum(form.state is not None for form in config.forms), "layer")
        facts.append(("states", f"{layers}, {size_text(inspected.state_bytes)} of each sequence"))
    if inspected.head is not None:
        size = f"{inspected.head.parameters / 1e6:.1f} M, {size_text(inspected.head.format_bytes['native'])}"
        facts.append(("drafts", f"by a head of its own: {size} (--draft mtp)"))
    facts += [
        (f"tensors {kind.type_name}", f"{kind.count:>5}  {size_text(kind.file_bytes):>10} in the file")
        for kind in inspected.tensor_types
    ]
    facts += [
        (f"as {name}", f"{size_text(size):>17} in memory") for name, size in inspected.format_bytes.items()
    ]
    return facts


def _heads(config: ModelConfig) -> str:
    latent = config.latent
    if config.has_mixed_heads:
        own = dict.fromkeys(part.heads for part in config.keeping)
        by_layer = " or ".join(f"{heads.n_kv_heads} of {heads.head_dim}" for heads in own)
        return f"{config.n_heads} query, key/value: {by_layer}"
    if latent is None:
        return f"{config.n_heads} query, {config.n_kv_heads} key/value, of {config.head_dim}"
    vectors = counted(config.n_layers, "latent vector")
    return f"{config.n_heads} query, over {vectors} a token of {latent.vector} numbers"


def _listed(ids: tuple[int, ...]) -> str:
    return " ".join(map(str, ids)) or "none"


BAR_COLUMNS = 20
RATE_OVER_S = 10.0


def size_text(n_bytes: int) -> str:
    """Format a size in decimal units, as disks and bandwidths are counted."""
    if n_bytes < 1e9:
        return f"{n_bytes / 1e6:.1f} MB"
    return f"{n_bytes / 1e9:.2f} GB"


class DownloadBar:
    """The line of a download: a bar, bytes, the recent rate in bytes/s, the time left."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def saw(self, here: int, now_s: float) -> None:
        """Note that `here` bytes have arrived by `now_s`, from which the rate is derived."""
        self._seen.append((now_s, here))
        while now_s - self._seen[0][0] > RATE_OVER_S and len(self._seen) > 2:
            self._seen.popleft()

    def text(self, total: int) -> str:
        """Text of the bar after the last `saw`, which must have been called."""
        (first_s, first), (now_s, here) = self._seen[0], self._seen[-1]
        share = here / total if total else 1.0
        bytes_per_s = (here - first) / max(now_s - first_s, 1e-3)
        full = round(BAR_COLUMNS * share)
        bar = "#" * full + "." * (BAR_COLUMNS - full)
        left_s = (total - here) / bytes_per_s if bytes_per_s else math.inf
        left = f", {left_s:.0f} s left" if left_s < 100 else f", {left_s / 60:.0f} min left"
        rate = f"{bytes_per_s / 1e6:.1f} MB/s{left if bytes_per_s else ''}"
        return f"{bar} {100 * share:3.0f} %  {size_text(here)} of {size_text(total)}, {rate}"


def list_text(
    fetchable: Sequence[Mapping[str, Any]],
    stored: Sequence[Mapping[str, Any]],
    packed: Sequence[Mapping[str, Any]],
) -> str:
    """Text of `models list`: names that can be fetched, fetched models, and packed files."""
    lines = ["known names"]
    for model in fetchable:
        about = "about " if model["is_rounded"] else ""
        lines.append(f"  {model['name']}  {about}{size_text(model['file_bytes'])}, {model['licence']}")
        lines.append(f"    {model['about']}")
        path = model["path"] or f"not here yet: phasewise models pull {model['name']}"
        lines.append(f"    {on_one_line(path)}")
    lines += ["", "models here"] if stored else []
    for model in stored:
        state = "" if model["is_whole"] else ", not whole: pull goes on"
        lines.append(_file_line(model, model["n_bytes"], state))
    lines += ["", "packed from models (made anew when they are missing)"] if packed else []
    for file in packed:
        state = "  (its model is gone)" if file["is_orphan"] else ""
        lines.append(_file_line(file, file["file_bytes"], state))
    return "\n".join(lines)


def _file_line(file: Mapping[str, Any], n_bytes: int, state: str) -> str:
    return f"  {size_text(n_bytes):>9}  {file['format']:<11}  {on_one_line(file['name'])}{state}"
