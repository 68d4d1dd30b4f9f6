import pytest

from megaverl.data.schema import RowChecker, RowRules

GOOD = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is 1+1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 3},
}
SOURCES = {"openai/gsm8k": lambda truth: None if str(truth).isdigit() else f"not a number: {truth!r}"}
RL = RowChecker(RowRules(sources=SOURCES))
SFT = RowChecker(RowRules(response_key="response"))


def test_a_good_row_becomes_a_row_and_gives_its_columns_back():
    row, problems = RL.check(GOOD, "f, row 0")
    assert problems == []
    assert row.columns() == GOOD


def test_a_string_prompt_is_allowed():
    row, problems = RL.check({**GOOD, "prompt": "1+1="}, "f, row 0")
    assert problems == []
    assert row.prompt == "1+1="


def test_null_fields_of_messages_are_dropped():
    # A parquet column of messages has the keys of all messages; those that a message lacks read as null.
    row, _ = RL.check({**GOOD, "prompt": [{"role": "user", "content": "hi", "name": None}]}, "f, row 0")
    assert row.prompt == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("change", "place", "words"),
    [
        ({"prompt": ...}, "key prompt", "missing"),
        ({"prompt": None}, "key prompt", "null"),
        ({"prompt": 3}, "key prompt", "int 3"),
        ({"prompt": []}, "key prompt", "empty"),
        ({"prompt": "  "}, "key prompt", "empty"),
        ({"prompt": ["hi"]}, "key prompt[0]", "role and content"),
        ({"prompt": [{"role": "usr", "content": "x"}]}, "key prompt[0].role", "unknown role 'usr'"),
        ({"prompt": [{"role": "user", "content": ""}]}, "key prompt[0].content", "empty"),
        ({"prompt": [{"role": "user", "content": None}]}, "key prompt[0].content", "null"),
        ({"prompt": [{"role": "user"}]}, "key prompt[0].content", "no content"),
        ({"prompt": [{"role": "user", "content": 7}]}, "key prompt[0].content", "int 7"),
        ({"data_source": ...}, "key data_source", "missing"),
        ({"data_source": None}, "key data_source", "null"),
        ({"data_source": ""}, "key data_source", "empty"),
        ({"data_source": 5}, "key data_source", "int 5"),
        ({"data_source": "openai/gsm8"}, "key data_source", "no scorer for data source 'openai/gsm8'"),
        ({"reward_model": ...}, "key reward_model", "missing"),
        ({"reward_model": None}, "key reward_model", "null"),
        ({"reward_model": "2"}, "key reward_model", "str '2'"),
        ({"reward_model": {"style": "rule"}}, "key reward_model.ground_truth", "missing"),
        ({"reward_model": {"ground_truth": None}}, "key reward_model.ground_truth", "null"),
        ({"reward_model": {"ground_truth": "two"}}, "key reward_model.ground_truth", "not a number"),
        ({"extra_info": "x"}, "key extra_info", "str 'x'"),
    ],
)
def test_a_bad_row_is_refused_by_file_row_and_key(change, place, words):
    values = {key: value for key, value in {**GOOD, **change}.items() if value is not ...}
    row, problems = RL.check(values, "train.parquet, row 12")
    assert row is None
    assert len(problems) == 1
    assert problems[0].where == f"train.parquet, row 12, {place}"
    assert words in problems[0].what


def test_the_nearest_name_is_offered():
    _, (source,) = RL.check({**GOOD, "data_source": "openai/gsm8"}, "f, row 0")
    assert "Did you mean 'openai/gsm8k'?" in source.fix
    _, (role,) = RL.check({**GOOD, "prompt": [{"role": "usr", "content": "x"}]}, "f, row 0")
    assert "Did you mean 'user'?" in role.fix


def test_all_problems_of_a_row_are_named():
    _, problems = RL.check({"prompt": [], "data_source": None}, "f, row 0")
    keys = {problem.where.rsplit("key ", 1)[1] for problem in problems}
    assert keys == {"prompt", "data_source", "reward_model"}


def test_a_custom_reward_takes_every_source():
    row, problems = RowChecker(RowRules(sources=None)).check({**GOOD, "data_source": "mine"}, "f, row 0")
    assert problems == []
    assert row.data_source == "mine"


@pytest.mark.parametrize(("response", "words"), [(..., "missing"), (None, "null"), ("", "empty"), (4, "int 4")])
def test_a_supervised_row_needs_a_response_and_nothing_of_the_reward(response, words):
    values = {"prompt": "hi", "response": response} if response is not ... else {"prompt": "hi"}
    row, problems = SFT.check(values, "f, row 1")
    assert row is None
    assert [problem.where for problem in problems] == ["f, row 1, key response"]
    assert words in problems[0].what
    assert SFT.check({"prompt": "hi", "response": "ho"}, "f, row 1")[0].response == "ho"


def test_a_supervised_row_may_name_a_source_as_text_only():
    good = {"prompt": "hi", "response": "ho"}
    assert SFT.check({**good, "data_source": "anything"}, "f, row 1")[0].data_source == "anything"
    _, problems = SFT.check({**good, "data_source": 5}, "f, row 1")
    assert [problem.where for problem in problems] == ["f, row 1, key data_source"]
