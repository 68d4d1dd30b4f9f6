"""Data source -> scorer: the built-in table, and the rules of a run (``reward.sources``) before it.

A rule is ``SOURCE=SCORER``, or a weighted sum ``SOURCE=SCORER*WEIGHT+SCORER``; SOURCE may hold ``*``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from megaverl.errors import Problem, Problems, UserError
from megaverl.rewards import formulas, gsm8k, text

if TYPE_CHECKING:
    from megaverl.config.schema import RewardConfig

ScoreFunction = Callable[..., Any]
SCORERS = ("gsm8k", "gsm8k_flexible", "math", "exact_match", "format", "length_penalty")
"""Names that a rule may use; `Registry` says what each does."""
BUILT_IN = {
    "openai/gsm8k": "gsm8k",
    "megaverl/arithmetic": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
}
_TERM = re.compile(r"\s*([a-z0-9_]+)\s*(?:\*\s*([-+]?[0-9.]+(?:e-?[0-9]+)?)\s*)?")


@dataclass(frozen=True)
class Scoring:
    """How the responses of one data source are judged.

    Attributes:
        compute: ``compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict``.
        check: what is wrong with a ground truth, or None; asked for every row before a run starts.
        isolated: a response may take for ever, so that it is judged in a process with a time-out.
        answer: what a response answers, for a vote among samples; None where the scorer cannot tell.
    """

    compute: ScoreFunction
    check: Callable[[Any], str | None]
    isolated: bool = False
    answer: Callable[[str], str | None] | None = None


@dataclass(frozen=True)
class Options:
    """What the scorers of the text alone are told (keys of ``reward`` with the same names)."""

    format_pattern: str = r"<think>.*</think>.*"
    length_limit: int = 4096
    length_buffer: int = 1024


class Registry(Mapping[str, Callable[[Any], str | None]]):
    """The scorers of a run. As a mapping: data source -> check of its ground truth. Pickles.

    Args:
        rules: ``reward.sources``; the first that fits a data source is taken, then the built-in table.

    Raises:
        UserError: rules that cannot be read, all of them.
    """

    def __init__(self, rules: Sequence[str] = (), options: Options | None = None) -> None:
        self.options = options or Options()
        problems = Problems()
        parsed = [_parse_rule(rule, problems) for rule in rules]
        seen = [source for source, _ in parsed]
        for source in sorted({s for s in seen if seen.count(s) > 1}):
            problems.add(f"has several rules for {source}", where="reward.sources", fix="leave one of them")
        _check_options(self.options, problems)
        problems.raise_if_any()
        self._rules = dict(parsed)
        for source, name in BUILT_IN.items():
            self._rules.setdefault(source, ((name, 1.0),))

    @classmethod
    def of(cls, config: RewardConfig) -> Registry:
        """The registry of a configuration."""
        return cls(config.sources, Options(config.format_pattern, config.length_limit, config.length_buffer))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._rules))

    def __len__(self) -> int:
        return len(self._rules)

    def __contains__(self, data_source: object) -> bool:
        return self._terms(str(data_source)) is not None

    def __getitem__(self, data_source: str) -> Callable[[Any], str | None]:
        terms = self._terms(data_source)
        if terms is None:
            raise KeyError(data_source)
        return self._scoring(terms).check

    def find(self, data_source: str) -> Scoring:
        """The scoring of a data source.

        Raises:
            UserError: there is none; lists the known ones.
        """
        terms = self._terms(data_source)
        if terms is not None:
            return self._scoring(terms)
        close = difflib.get_close_matches(str(data_source), list(self), n=1, cutoff=0.5)
        guess = f" Did you mean {close[0]!r}?" if close else ""
        fix = f"Known are {', '.join(self)}.{guess} For others set reward.sources or reward.function.path."
        raise UserError(Problem(f"no scorer for data source {data_source!r}", "key data_source", fix))

    def load(self) -> ScoreFunction:
        """`compute_score`: what `CustomFunction.load` is for a user's function."""
        return self.compute_score

    def label(self, data_source: str) -> str:
        """The scorer's name in messages."""
        return f"of {data_source}"

    def compute_score(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> float | dict[str, Any]:
        """Scores one response by its data source.

        Raises:
            UserError: no scorer for the data source.
        """
        return self.find(data_source).compute(data_source, solution_str, ground_truth, extra_info)

    def _terms(self, data_source: str) -> tuple[tuple[str, float], ...] | None:
        for source, terms in self._rules.items():
            if source == data_source or ("*" in source and fnmatchcase(data_source, source)):
                return terms
        return None

    def _scoring(self, terms: tuple[tuple[str, float], ...]) -> Scoring:
        parts = {name: self._scorer(name) for name, _ in terms}
        if len(terms) == 1 and terms[0][1] == 1.0:
            return parts[terms[0][0]]

        def compute(*arguments: Any, **named: Any) -> dict[str, Any]:
            found = {name: float(parts[name].compute(*arguments, **named)) for name, _ in terms}
            return {"score": sum(weight * found[name] for name, weight in terms), **found}

        def check(truth: Any) -> str | None:
            return next((reason for part in parts.values() if (reason := part.check(truth))), None)

        answer = next((part.answer for part in parts.values() if part.answer), None)
        return Scoring(compute, check, any(part.isolated for part in parts.values()), answer)

    def _scorer(self, name: str) -> Scoring:
        options = self.options
        return {
            "gsm8k": Scoring(gsm8k.compute_score, gsm8k.check_ground_truth, answer=gsm8k.extract_answer),
            "gsm8k_flexible": Scoring(_flexible, gsm8k.check_ground_truth, answer=_flexible_answer),
            "math": Scoring(formulas.compute_score, formulas.check_ground_truth, isolated=True),
            "exact_match": Scoring(text.exact_match, text.check_text, answer=str.strip),
            "format": Scoring(_of_text(lambda t: text.form(t, options.format_pattern)), _anything),
            "length_penalty": Scoring(
                _of_text(lambda t: text.length_penalty(t, options.length_limit, options.length_buffer)), _anything
            ),
        }[name]


def _flexible(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    return gsm8k.compute_score(data_source, solution_str, ground_truth, extra_info, method="flexible")


def _flexible_answer(solution_str: str) -> str | None:
    return gsm8k.extract_answer(solution_str, method="flexible")


def _of_text(judge: Callable[[str], float]) -> ScoreFunction:
    def compute(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
        return judge(solution_str)

    return compute


def _anything(truth: Any) -> str | None:
    return None


def _parse_rule(rule: str, problems: Problems) -> tuple[str, tuple[tuple[str, float], ...]]:
    source, equals, right = rule.rpartition("=")  # a data source may hold a =, the name of a scorer may not
    terms: list[tuple[str, float]] = []
    where = f"reward.sources, {rule!r}"
    how = f"write SOURCE=SCORER or SOURCE=SCORER*WEIGHT+SCORER with {', '.join(SCORERS)}"
    if not equals or not source.strip() or not right.strip():
        problems.add("is no rule for a data source", where=where, fix=how)
        return rule, ()
    for part in right.split("+"):
        found = _TERM.fullmatch(part)
        name = found[1] if found else part.strip()
        if found is None or name not in SCORERS:
            close = difflib.get_close_matches(name, SCORERS, n=1)
            guess = f"did you mean {close[0]}? " if close else ""
            problems.add(f"there is no scorer {name!r}", where=where, fix=guess + how)
        elif name in dict(terms):
            problems.add(f"names the scorer {name} twice", where=where, fix="give it once, with one weight")
        else:
            terms.append((name, float(found[2] or 1.0)))
    return source.strip(), tuple(terms)


def _check_options(options: Options, problems: Problems) -> None:
    try:
        re.compile(options.format_pattern)
    except re.error as error:
        where = f"reward.format_pattern={options.format_pattern}"
        problems.add(f"is no regular expression: {error}", where=where, fix="correct the pattern (Python's re)")
    if options.length_buffer > options.length_limit:
        problems.add(
            f"is more than reward.length_limit={options.length_limit}",
            where=f"reward.length_buffer={options.length_buffer}",
            fix="the penalty grows over the last length_buffer characters before length_limit: make it smaller",
        )
