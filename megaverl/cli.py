"""The ``megaverl`` command: one short function per sub-command.

Exit codes: 0 done, 1 the run failed, 2 the input or the configuration is wrong, 130 stopped with Ctrl-C.
With ``--json`` standard output holds one JSON document, and everything else goes to standard error.

Each sub-command imports what it needs when it runs: help and configuration errors load neither torch nor Ray.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from megaverl import __version__
from megaverl.commands.output import OutputClosed, report_error
from megaverl.errors import MegaverlError, Problem, UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; an unexpected error leaves with its traceback."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        args = _parse(words)
        return args.run(args)
    except MegaverlError as error:
        report_error(error, as_json="--json" in words)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped with Ctrl-C; a run with checkpoints goes on from the newest one", file=sys.stderr)
        return 130
    except OutputClosed:  # `megaverl ... | head`: what a shell gives for SIGPIPE
        return 141


def _train(args: argparse.Namespace) -> int:
    from megaverl.commands import train

    return train.run(args.overrides, dry_run=args.dry_run, submit=args.submit, as_json=args.json)


def _demo(args: argparse.Namespace) -> int:
    from megaverl.commands import demo

    return demo.run(args.seed, args.layout, args.dir, as_json=args.json)


def _config_describe(args: argparse.Namespace) -> int:
    from megaverl.commands import config

    return config.show_fields(args.key, as_json=args.json)


def _config_show(args: argparse.Namespace) -> int:
    from megaverl.commands import config

    return config.show_config(args.config, args.overrides, as_json=args.json)


def _data_gsm8k(args: argparse.Namespace) -> int:
    from megaverl.commands import data

    return data.gsm8k(args.source, args.out, overwrite=args.overwrite, as_json=args.json)


def _data_arithmetic(args: argparse.Namespace) -> int:
    from megaverl.commands import data

    return data.arithmetic(args.out, args.seed, overwrite=args.overwrite, as_json=args.json)


def _data_rows(args: argparse.Namespace) -> int:
    from megaverl.commands import data
    from megaverl.data.mapping import ColumnMap

    columns = ColumnMap(
        prompt=args.prompt,
        ground_truth=args.answer,
        response=args.response,
        data_source=args.source,
        data_source_column=args.source_column,
        ability=args.ability,
        instruction=args.instruction,
        plain=args.plain,
        boxed=args.boxed,
    )
    return data.rows(args.files, args.out, columns, overwrite=args.overwrite, as_json=args.json)


def _data_preference(args: argparse.Namespace) -> int:
    from megaverl.commands import data

    names = {"prompt": args.prompt, "chosen": args.chosen, "rejected": args.rejected}
    return data.preference(args.files, args.out, names, overwrite=args.overwrite, as_json=args.json)


def _data_check(args: argparse.Namespace) -> int:
    from megaverl.commands import data

    return data.check(
        args.overrides, config_path=args.config, tokenizer=args.tokenizer, kind=args.kind, as_json=args.json
    )


def _plan_reshard(args: argparse.Namespace) -> int:
    from megaverl.commands import plan

    return plan.reshard(args.model, args.train, args.rollout, element_bytes=args.element_bytes, as_json=args.json)


def _convert_to_hf(args: argparse.Namespace) -> int:
    from megaverl.commands import convert

    return convert.to_hf(
        args.checkpoint, args.out, model=args.model, role=args.role, shard_size=args.shard_size, as_json=args.json
    )


def _convert_to_megatron(args: argparse.Namespace) -> int:
    from megaverl.commands import convert

    return convert.to_megatron(args.model, args.out, tp=args.tp, pp=args.pp, as_json=args.json)


def _convert_verify(args: argparse.Namespace) -> int:
    from megaverl.commands import convert

    return convert.verify(args.model, tp=args.tp, pp=args.pp, as_json=args.json)


def _status(args: argparse.Namespace) -> int:
    from megaverl.commands import status

    return status.run(args.run_dir, as_json=args.json)


def _report(args: argparse.Namespace) -> int:
    from megaverl.commands import report

    return report.run(args.run_dir, args.out, as_json=args.json)


def _doctor(args: argparse.Namespace) -> int:
    from megaverl.commands import doctor

    return doctor.run(as_json=args.json)


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are user errors like all others (exit code 2, JSON with ``--json``)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **options)  # an abbreviation breaks when an option is added

    def error(self, message: str) -> NoReturn:
        raise UserError(Problem(message, where="command line", fix=f"`{self.prog} --help` shows how it is used"))


class _TrainParser(_Parser):
    """Help that ends with every key of the configuration."""

    def format_help(self) -> str:
        from megaverl.commands.config import fields_text

        return f"{super().format_help()}\n{fields_text()}"


def _parse(words: list[str]) -> argparse.Namespace:
    args, rest = _parser().parse_known_args(words)
    # argparse takes one run of positional words only: `train c.yaml a=1 --dry-run b=2` leaves b=2 over.
    late = [word for word in rest if "=" in word and not word.startswith("-")] if hasattr(args, "overrides") else []
    unknown = [word for word in rest if word not in late]
    if unknown:
        raise UserError(
            Problem(
                f"unknown argument{'s' * (len(unknown) > 1)} {' '.join(unknown)}",
                where="command line",
                fix="megaverl --help, or --help after the command, lists what there is",
            )
        )
    if late:
        args.overrides = [*args.overrides, *late]
    return args


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="megaverl", description="RL post-training of language models on Megatron-Core.")
    parser.add_argument("--version", action="version", version=f"megaverl {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    _add_train(commands)
    _add_config(commands)
    _add_data(commands)
    _add_plan(commands)
    _add_convert(commands)
    status = commands.add_parser("status", help="say where a run stands")
    report = commands.add_parser("report", help="write one HTML file with the curves of a run")
    for part in (status, report):
        part.add_argument("run_dir", metavar="RUN", help="folder of the run (trainer.run_dir)")
    report.add_argument("--out", metavar="FILE", help="file to write (default RUN/report.html)")
    _finish(status, _status)
    _finish(report, _report)
    doctor = commands.add_parser("doctor", help="show versions, devices and the kernels that a run would take")
    _finish(doctor, _doctor)
    demo = commands.add_parser("demo", help="train a tiny model with GRPO from nothing, on any machine")
    demo.add_argument("--seed", type=int, default=0, help="seed of everything (default 0)")
    demo.add_argument("--layout", choices=("tp2", "dp2"), default="tp2", help="how two workers share the model")
    demo.add_argument("--dir", default="runs/demo", help="folder for all it writes (default runs/demo)")
    _finish(demo, _demo)
    return parser


def _finish(parser: argparse.ArgumentParser, run: object) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output, the rest on stderr")
    parser.set_defaults(run=run)


def _add_config_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file, e.g. configs/yaml/grpo_gsm8k.yaml")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="keys to change, e.g. rollout.n=16")


def _add_train(commands: argparse._SubParsersAction) -> None:
    about = "train a model as a configuration says"
    # parser_class is the sub-parsers' own; only this one knows the configuration's keys.
    commands._parser_class = _TrainParser
    train = commands.add_parser("train", help=about, description=f"{about[0].upper()}{about[1:]}.")
    commands._parser_class = _Parser
    train.add_argument(
        "overrides",
        metavar="CONFIG key=value",
        nargs="*",
        help="YAML file and keys to change; or a command line of verl's without a file (docs/from-verl.md)",
    )
    train.add_argument("--config-path", "--config-name", "--config-dir", metavar="X", help="verl's, without effect")
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="print command, resolved configuration and reshard plan, and stop; needs no weights",
    )
    train.add_argument(
        "--submit", action="store_true", help="run as a Ray job on the cluster of RAY_ADDRESS or cluster.address"
    )
    _finish(train, _train)


def _add_config(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("config", help="explain keys, show a resolved configuration")
    parts = parser.add_subparsers(metavar="WHAT", required=True, parser_class=_Parser)
    describe = parts.add_parser("describe", help="type, default, bounds and meaning of keys")
    describe.add_argument("key", metavar="KEY", nargs="?", help="a key or a section; all when left out")
    _finish(describe, _config_describe)
    show = parts.add_parser("show", help="print the configuration with everything it inherits and all defaults")
    _add_config_words(show)
    _finish(show, _config_show)


def _add_data(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("data", help="prepare and check rows")
    parts = parser.add_subparsers(metavar="WHAT", required=True, parser_class=_Parser)
    gsm8k = parts.add_parser("gsm8k", help="make train.parquet and test.parquet from the published GSM8K")
    gsm8k.add_argument("source", metavar="FOLDER", help="folder with the train and test split: jsonl, parquet or Arrow")
    arithmetic = parts.add_parser("arithmetic", help="make the rows of the small arithmetic task")
    arithmetic.add_argument("--seed", type=int, default=0, help="seed of the questions (default 0)")
    for part in (gsm8k, arithmetic):
        part.add_argument("--out", metavar="FOLDER", required=True, help="folder to write to")
        part.add_argument("--overwrite", action="store_true", help="replace files that exist")
    _finish(gsm8k, _data_gsm8k)
    _finish(arithmetic, _data_arithmetic)
    _add_data_mapping(parts)
    check = parts.add_parser("check", help="check files as a run would; report counts and lengths")
    check.add_argument(
        "overrides",
        metavar="FILE",
        nargs="*",
        help="parquet or jsonl files, or key=value; the configuration's by default",
    )
    check.add_argument("--config", metavar="CONFIG", help="YAML file of the run")
    check.add_argument("--tokenizer", metavar="FOLDER", help="folder of the tokenizer; the configuration's by default")
    check.add_argument(
        "--kind",
        choices=("rl", "sft", "pair", "kto"),
        help="what the rows are for (pair: rm and dpo); the configuration's by default",
    )
    _finish(check, _data_check)


def _add_data_mapping(parts: argparse._SubParsersAction) -> None:
    rows = parts.add_parser("rows", help="make rows from files whose columns have other names")
    rows.add_argument("--answer", metavar="COLUMN", help="the right answer, for the scorer")
    rows.add_argument("--boxed", action="store_true", help="the answer is in the column's last \\boxed{..}, as in MATH")
    rows.add_argument("--response", metavar="COLUMN", help="the answer to learn, for supervised training")
    source = rows.add_mutually_exclusive_group()
    source.add_argument("--source", metavar="NAME", default="", help="data source of all rows; picks the scorer")
    source.add_argument("--source-column", metavar="COLUMN", help="column with the data source of each row")
    rows.add_argument("--ability", metavar="NAME", default="", help="label of all rows, such as math")
    rows.add_argument("--instruction", metavar="TEXT", default="", help="put after each prompt that is a text")
    rows.add_argument("--plain", action="store_true", help="texts go to the model without the chat template")
    pairs = parts.add_parser("preference", help="make preference pairs: prompt, chosen, rejected")
    for name in ("chosen", "rejected"):
        pairs.add_argument(f"--{name}", metavar="COLUMN", default=name, help=f"default {name}")
    for part in (rows, pairs):
        part.add_argument("files", metavar="FILE", nargs="+", help="jsonl, parquet, Arrow; folders and globs of them")
        part.add_argument("--prompt", metavar="COLUMN", default="prompt", help="the prompt (default prompt)")
        part.add_argument("--out", metavar="FILE", required=True, help="parquet file to write")
        part.add_argument("--overwrite", action="store_true", help="replace a file that exists")
    _finish(rows, _data_rows)
    _finish(pairs, _data_preference)


def _add_plan(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("plan", help="compute what a run would do, without running it")
    parts = parser.add_subparsers(metavar="WHAT", required=True, parser_class=_Parser)
    reshard = parts.add_parser("reshard", help="which bytes move when the weights go from training to rollout")
    reshard.add_argument("--model", metavar="FOLDER", required=True, help="Hugging Face checkpoint (config.json)")
    reshard.add_argument("--train", metavar="LAYOUT", required=True, help="training layout, e.g. tp=2,pp=1,dp=4")
    reshard.add_argument("--rollout", metavar="LAYOUT", required=True, help="rollout layout, e.g. tp=2")
    reshard.add_argument(
        "--element-bytes", type=int, choices=(2, 4), default=4, help="bytes of one weight (default 4, fp32)"
    )
    _finish(reshard, _plan_reshard)


def _add_convert(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("convert", help="convert checkpoints, and prove that nothing is lost")
    parts = parser.add_subparsers(metavar="WHAT", required=True, parser_class=_Parser)
    to_hf = parts.add_parser("to-hf", help="make a Hugging Face checkpoint from a checkpoint of a run")
    to_hf.add_argument("checkpoint", metavar="CHECKPOINT", help="e.g. runs/mine/checkpoints/step_100")
    to_hf.add_argument("out", metavar="OUT", help="folder to make")
    to_hf.add_argument("--model", metavar="FOLDER", help="checkpoint that the run started from; the run's by default")
    to_hf.add_argument("--role", choices=("actor", "critic"), default="actor", help="which model (default actor)")
    to_hf.add_argument("--shard-size", metavar="SIZE", help="largest weights file (the run's, or 5GB)")
    _finish(to_hf, _convert_to_hf)
    to_megatron = parts.add_parser(
        "to-megatron", help="divide a checkpoint into one file per rank, by Megatron's names"
    )
    verify = parts.add_parser("verify", help="compare with transformers and with itself after a round trip")
    for part in (to_megatron, verify):
        part.add_argument("model", metavar="HF", help="folder of a Hugging Face checkpoint")
        if part is to_megatron:
            part.add_argument("out", metavar="OUT", help="folder to make")
        part.add_argument("--tp", type=int, default=1, help="tensor parallel size (default 1)")
        part.add_argument("--pp", type=int, default=1, help="pipeline parallel size (default 1)")
    _finish(to_megatron, _convert_to_megatron)
    _finish(verify, _convert_verify)


if __name__ == "__main__":
    sys.exit(main())
