"""`python -m chatkv.spec.train STAGE --minutes N --out FOLDER`: one stage under a clock.

A stage reads what earlier stages left in the folder and goes on from there, so a run may be
killed at any time and continued on another machine.
"""

# Tensors are not typed closely enough for strict rules.
# pyright: standard

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from chatkv.errors import ChatKVError
from chatkv.models import catalog
from chatkv.models.cuda_load import load_weights, read_spec
from chatkv.models.dense import DenseWeights
from chatkv.models.devices import expect_cuda
from chatkv.spec.heads import eagle3
from chatkv.spec.heads.file import load as load_head
from chatkv.spec.heads.file import save as save_head
from chatkv.spec.heads.shape import KINDS
from chatkv.spec.train import vocabulary
from chatkv.spec.train.distill import DistillConfig, distill
from chatkv.spec.train.export import export
from chatkv.spec.train.heads import TrainConfig, checkpoint, train
from chatkv.spec.train.lessons import LessonStore
from chatkv.spec.train.measure import answer_prompts, summary, walks
from chatkv.spec.train.packing import pack
from chatkv.spec.train.prompts import Frame, read_prompts
from chatkv.spec.train.shards import Conversation
from chatkv.spec.train.vocabulary import read_all
from chatkv.tokenizer import Tokenizer

STARTED = time.monotonic()
DRAFT_IDS = 16384
"""Guessed among: 98 % of what the default model writes. A CPU takes the frequent half, 94 %."""
SAVING_S = 4.0
"""Kept for the last look and the files."""
CPU_SEATS, CPU_ROWS = 8, 1
"""Conversations, and rows of a training step, at once on a CPU: a thousand of them take 24 GB
there, and longer to begin than a stage has."""
INTERRUPTED = 130


def report(line: str) -> None:
    """One line to stderr, with the seconds since the start."""
    sys.stderr.write(f"[{time.monotonic() - STARTED:6.1f} s] {line}\n")
    sys.stderr.flush()


def load(options: argparse.Namespace) -> tuple[DenseWeights, Tokenizer]:
    """The target, in bfloat16 on the device."""
    place = torch.device("cpu") if options.device == "cpu" else expect_cuda(options.device)
    return load_weights(catalog.find(options.model), place, torch.bfloat16)


def run_distill(options: argparse.Namespace) -> dict[str, Any]:
    weights, tokenizer = load(options)
    config = DistillConfig(
        prompts=tuple(options.prompts),
        out=options.out,
        seconds=60 * options.minutes - (time.monotonic() - STARTED),
        seats=options.seats or (CPU_SEATS if options.device == "cpu" else 2048),
        length=options.length,
        answer_tokens=options.answer_tokens,
        max_tokens=options.max_tokens,
    )
    return distill(config, weights, tokenizer, report)


def run_vocabulary(options: argparse.Namespace) -> dict[str, Any]:
    spec, _ = load(options)
    return choose_ids(options, spec, read_all(options.out, spec.spec.weights_digest))


def choose_ids(
    options: argparse.Namespace, weights: DenseWeights, conversations: Sequence[Conversation]
) -> dict[str, Any]:
    """Run the stage `vocabulary` over conversations that are read already."""
    spec = weights.spec
    ids, facts = vocabulary.make(conversations, spec.vocab_size, options.draft_ids, spec.eos_ids)
    vocabulary.write(options.out, ids, facts)
    return facts


def run_train(options: argparse.Namespace) -> dict[str, Any]:
    deadline = STARTED + 60 * options.minutes
    weights, tokenizer = load(options)
    conversations = read_all(options.out, weights.spec.weights_digest)
    report(f"{len(conversations):,} conversations")
    if vocabulary.read(options.out) is None:
        report(str(choose_ids(options, weights, conversations)))
    ids = vocabulary.read(options.out)
    assert ids is not None, "the stage before has run"
    packed = pack(conversations, options.length, options.seed)
    report(f"{len(packed.ids):,} rows of {options.length}, "
           f"{(packed.documents > 0).mean():.1%} of them filled")  # fmt: skip
    unseen = max(1, min(len(packed.ids) // 50, 128))
    begun, share = time.monotonic(), options.tap_share
    held_out = LessonStore.build(weights, packed.part(0, unseen), ids)
    until = begun + share * (deadline - begun)
    store = LessonStore.build(
        weights, packed.part(unseen, len(packed.ids)), ids, lambda: time.monotonic() < until
    )
    report(f"taps of {len(store):,} rows in {time.monotonic() - begun:.1f} s")
    config = TrainConfig(
        out=options.out,
        seconds=deadline - time.monotonic() - SAVING_S,
        kinds=tuple(options.kinds),
        rows=options.rows or (CPU_ROWS if options.device == "cpu" else 16),
        rate=options.rate,
        seed=options.seed,
    )
    return train(config, weights, tokenizer, store, held_out, report)


def run_measure(options: argparse.Namespace) -> dict[str, Any]:
    weights, tokenizer = load(options)
    texts = read_prompts(options.prompts)[: options.limit]
    rows = [[tokenizer.encode(turn, special=False) for turn in turns] for turns in texts]
    seats = options.seats or (CPU_SEATS if options.device == "cpu" else 1024)
    config = DistillConfig(
        (), options.out, 60 * options.minutes, seats, options.length, options.answer_tokens
    )
    done = answer_prompts(config, weights, Frame.of(tokenizer), rows, options.temperatures)
    report(f"{len(done)} conversations, {sum(len(c.ids) for c in done):,} tokens")
    paths = {kind: checkpoint(options.out, kind) for kind in options.kinds}
    files = {
        kind: load_head(path, weights.spec, tokenizer.tok_fp())
        for kind, path in paths.items()
        if path.is_file()
    }
    for file in files.values():
        file.head.to(weights.device)
    table: dict[str, Any] = {}
    for kind, by_form in walks(files, weights, done).items():
        for form, found in by_form.items():
            for heat in options.temperatures:
                line = summary([walk for walk in found if walk.temperature == heat])
                table.setdefault(kind, {}).setdefault(form, {})[f"{heat:g}"] = line
                report(f"{kind}, {form}, T={heat:g}: {line}")
        save_head(paths[kind], replace(files[kind], measured=table[kind]))
    (options.out / "measured.json").write_text(json.dumps(table))
    return {"kinds": ", ".join(table)}


def run_import(options: argparse.Namespace) -> dict[str, Any]:
    spec, tokenizer = read_spec(catalog.find(options.model))
    file = eagle3.read(options.folder, spec, tokenizer.tok_fp())
    path = options.to / f"{spec.name.lower()}-{options.folder.name.lower()}.safetensors"
    save_head(path, file, packed=True)
    return {"file": path, "bytes": path.stat().st_size}


def run_export(options: argparse.Namespace) -> dict[str, Any]:
    weights, tokenizer = load(options)
    facts = {"command": options.command, "device": options.device_name}
    known = {name: value for name, value in facts.items() if value}
    path = checkpoint(options.out, options.kind)
    measured = options.out / "measured.json"
    table = json.loads(measured.read_text()) if measured.is_file() else {}
    written = export(
        path, weights.spec, tokenizer.tok_fp(), options.to, known, table.get(options.kind)
    )
    return {"file": written, "bytes": written.stat().st_size}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m chatkv.spec.train", description=__doc__)
    stages = top.add_subparsers(dest="stage", required=True)

    def stage(name: str, run: Any, minutes: float) -> argparse.ArgumentParser:
        made = stages.add_parser(name)
        made.set_defaults(run=run)
        made.add_argument("--model", default=catalog.DEFAULT_MODEL)
        made.add_argument("--device", default="cuda")
        made.add_argument("--out", type=Path, required=True, help="folder of all stages' files")
        made.add_argument("--minutes", type=float, default=minutes, help="loading included")
        return made

    made = stage("distill", run_distill, 6)
    made.add_argument("--prompts", type=Path, nargs="*", default=[], help="JSON lines or folders")
    made.add_argument("--seats", type=int, help="conversations at once")
    made.add_argument("--length", type=int, default=1024, help="longest conversation")
    made.add_argument("--answer-tokens", type=int, default=384)
    made.add_argument("--max-tokens", type=int, default=20_000_000)

    made = stage("vocabulary", run_vocabulary, 1)
    made.add_argument("--draft-ids", type=int, default=DRAFT_IDS)

    made = stage("train", run_train, 13)
    made.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    made.add_argument("--draft-ids", type=int, default=DRAFT_IDS)
    made.add_argument("--length", type=int, default=1024, help="tokens of a packed row")
    made.add_argument("--rows", type=int, help="packed rows of a step")
    made.add_argument("--rate", type=float, default=1e-3)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--tap-share", type=float, default=0.4, help="most of the time for taps")

    made = stage("measure", run_measure, 3)
    made.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    made.add_argument("--prompts", type=Path, nargs="+", required=True, help="never trained on")
    made.add_argument("--limit", type=int, default=None, help="prompts at most")
    made.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    made.add_argument("--seats", type=int, help="conversations at once")
    made.add_argument("--length", type=int, default=1536)
    made.add_argument("--answer-tokens", type=int, default=256)

    made = stage("import", run_import, 1)
    made.add_argument("--folder", type=Path, required=True, help="an EAGLE-3 head of others")
    made.add_argument("--to", type=Path, required=True, help="folder of the file")

    made = stage("export", run_export, 1)
    made.add_argument("--kind", choices=KINDS, required=True)
    made.add_argument("--to", type=Path, required=True, help="folder of the file and its card")
    made.add_argument("--device-name", default="", help="trained on; for the card")
    made.add_argument("--command", default="", help="that trained it; for the card")
    return top


def main() -> int:
    options = parser().parse_args()
    try:
        found = options.run(options)
    except ChatKVError as error:
        report(f"{error.message} {error.hint}")
        return error.exit_code
    except KeyboardInterrupt:
        report("interrupted; what is in the folder is whole")
        return INTERRUPTED
    report(", ".join(f"{name} {value}" for name, value in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
