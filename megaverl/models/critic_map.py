"""Names of a critic: the rows of its family's body and a value head in place of the output layer. Pure.

Its Hugging Face form is a token classification with one label: ``score.weight`` [1, hidden] and ``score.bias`` [1].
A critic starts from such a checkpoint, from a sequence classification with one label (a reward model; it has no
``score.bias``, which then is 0), or from a causal language model: its output layer is left where it is, and the value
head starts at zero, so that all first values are 0 and the first advantages plain returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaverl.errors import Problem, UserError
from megaverl.models.family import FAMILIES, read_config, shape_from_config, weight_map
from megaverl.models.shape import ModelShape
from megaverl.models.weight_map import Row, WeightMap

HEAD_WEIGHT, HEAD_BIAS = "score.weight", "score.bias"
LANGUAGE_MODEL, TOKENS, SEQUENCES = "ForCausalLM", "ForTokenClassification", "ForSequenceClassification"
OUTPUT_LAYER = "output_layer.weight"


@dataclass(frozen=True)
class CriticSource:
    """A checkpoint that a critic can start from.

    Attributes:
        shape: of the critic; ``tied`` says what config.json says, though a critic has no output layer to tie.
        tensors: the table of what the files must hold.
    """

    shape: ModelShape
    tensors: WeightMap

    @property
    def has_head(self) -> bool:
        """The files bring a value head."""
        return HEAD_WEIGHT in self.tensors.hf_names()


def critic_source(path: Path | str) -> CriticSource:
    """What the checkpoint in folder ``path`` must hold, by its config.json.

    Raises:
        UserError: as `family.load_shape`, or the classification has other than one label.
    """
    file = Path(path) / "config.json"
    config = read_config(file)
    kind = classification_kind(config)
    labels = config.get("id2label")
    count = len(labels) if labels is not None else config.get("num_labels", 2)  # transformers' default is 2
    if kind != LANGUAGE_MODEL and count != 1:
        raise UserError(
            Problem(
                f"a classification with {count} labels, and a value is one number",
                where=f"{file}, key id2label",
                fix="start the critic from a classification with one label, or from a causal language model",
            )
        )
    shape = shape_from_config(_as_language_model(config), where=str(file))
    tensors = {
        LANGUAGE_MODEL: weight_map(shape),
        TOKENS: critic_map(shape),
        SEQUENCES: critic_map(shape, bias=False),
    }[kind]
    return CriticSource(shape, tensors)


def critic_map(shape: ModelShape, *, bias: bool = True) -> WeightMap:
    """The table of names of a critic whose body has this shape; without ``bias``, of a sequence classification."""
    head = [Row("value_head.weight", (HEAD_WEIGHT,), HEAD_WEIGHT, "replicated", "last", shapes=((1, shape.hidden),))]
    if bias:
        head.append(Row("value_head.bias", (HEAD_BIAS,), HEAD_BIAS, "replicated", "last", shapes=((1,),)))
    body = (row for row in weight_map(shape).rows if row.megatron != OUTPUT_LAYER)
    return WeightMap(replace(shape, tied=False), (*body, *head))


def classification_kind(config: Mapping[str, Any]) -> str:
    """`TOKENS`, `SEQUENCES` or (all else) `LANGUAGE_MODEL`, by ``architectures``."""
    name = _architecture(config)
    return next((kind for kind in (TOKENS, SEQUENCES) if name.endswith(kind)), LANGUAGE_MODEL)


def token_classification_config(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """The config.json of a critic that started from a checkpoint with ``config``: a token classification, one label.

    Dropout before the head, which transformers would add in training, is 0 where the config says nothing.
    """
    result = _classification_config(config, shape, TOKENS)
    result.setdefault("classifier_dropout", 0.0)
    return result


def sequence_classification_config(
    config: Mapping[str, Any], shape: ModelShape, pad_id: int | None = None
) -> dict[str, Any]:
    """The config.json of a reward model that started from a checkpoint with ``config``: one label.

    Args:
        pad_id: padding id; transformers takes the last token that is another one as the end of a sequence. None, for
            a tokenizer that pads with its end token, leaves it out: transformers then scores one sequence at a time.
    """
    given, end = config.get("pad_token_id"), config.get("eos_token_id")
    ends = end if isinstance(end, list) else [end]
    if pad_id is None and given not in ends:
        pad_id = given
    return _classification_config(config, shape, SEQUENCES) | {"pad_token_id": pad_id}


def _classification_config(config: Mapping[str, Any], shape: ModelShape, kind: str) -> dict[str, Any]:
    (family,) = (family for family in FAMILIES if family.name == shape.family)
    result = dict(config)
    result["architectures"] = [family.architectures[0].removesuffix(LANGUAGE_MODEL) + kind]
    result.pop("num_labels", None)
    if len(result.get("id2label") or {}) != 1:
        result |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return result


def _as_language_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the causal language model's name, by which families are found."""
    name, kind = _architecture(config), classification_kind(config)
    if kind == LANGUAGE_MODEL:
        return dict(config)
    return {**config, "architectures": [name.removesuffix(kind) + LANGUAGE_MODEL]}


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or [""]
    return named if isinstance(named, str) else str(named[0])
