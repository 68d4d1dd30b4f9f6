"""Generated plain text: what the tiny tokenizer learns its merges from. No file is read."""

from __future__ import annotations

import random

from megaverl.data.arithmetic import demonstrate, draw


def _words(text: str) -> list[str]:
    return text.split()


def _phrases(text: str) -> list[str]:
    return text.split("|")


PEOPLE = _words(
    "Alice Bruno Carla David Elena Farid Grace Hugo Irene Jonas Karen Liam Maria Nadia Oscar Petra Quentin Rosa "
    "Simon Tara Umar Vera Walter Xenia Yusuf Zoe"
)
THINGS = _words(
    "apple banana bottle bread bridge candle carpet chair cookie country dollar engine feather flower garden hammer "
    "island jacket kitchen ladder letter market minute mountain notebook orange pencil picture question river school "
    "shirt sticker student sugar table teacher ticket train tree village water window winter"
)
VERBS = _words(
    "adds answers asks bakes brings builds buys carries checks collects counts divides draws earns eats explains "
    "fills finds gives grows helps holds keeps learns leaves looks makes measures moves needs opens packs paints pays "
    "plants plays reads receives remembers saves sells sends shares shows solves spends starts stops takes teaches "
    "tells thinks travels turns uses waits walks wants washes watches wins works writes"
)
QUALITIES = _words(
    "big bright careful cheap clean cold cool dark deep different early easy empty fresh full good happy hard heavy "
    "important large light little long narrow old open possible quick quiet red rich round short simple slow small "
    "smooth strong sweet tall thick true warm wide wooden yellow young"
)
TIMES = _phrases(
    "today|yesterday|tomorrow|every morning|in the afternoon|at night|on Monday|on Friday|last week|next month|"
    "in the summer|before lunch|after school|twice a day|once a year"
)
PLACES = _phrases(
    "at home|in the city|near the station|by the lake|in a small shop|behind the house|on the farm|at the library|"
    "under the bridge|across the street"
)
FRAMES = (
    "{p} {v} the {q} {t} {when}.",
    "{when}, {p} and {o} went {where} with {n} {t}s.",
    "The {t} {where} is {q} and {r}, but the {u} is not.",
    "How many {t}s does {p} have if {o} {v} {n} of them?",
    "Each {t} costs ${n}, so {p} pays {n} times {m} dollars in total.",
    "There are {n} {t}s and {m} {u}s; together that makes more than half of the {q} ones.",
    "First we calculate the number of {t}s. Then we subtract the {u}s that {p} {v}.",
    "Let x be the price of one {t}. Therefore x = {n} / {m}, which is the final answer.",
    'Please answer this: "Why {v} {p} a {q} {t}?"\nBecause {o} {v} it {where}.',
    "You are a helpful assistant. Think step by step and give the answer after ####.\n",
    "{n}+{m}={k}\n#### {k}",
    "def total({t}, {u}):\n    return {t} + {u}\n",
)


def sentences(n: int, seed: int) -> list[str]:
    """``n`` generated texts: two thirds general sentences, one third questions and answers of the tiny task."""
    rng = random.Random(f"corpus/{seed}")
    texts: list[str] = []
    while len(texts) < n:
        if rng.random() < 1 / 3:
            problem = draw(rng, held_out=False)
            texts.append(f"user\n{problem.question}\nassistant\n{demonstrate(problem, rng)}")
            continue
        first, second = rng.randint(1, 99), rng.randint(1, 99)
        texts.append(
            rng.choice(FRAMES).format(
                p=rng.choice(PEOPLE),
                o=rng.choice(PEOPLE),
                v=rng.choice(VERBS),
                t=rng.choice(THINGS),
                u=rng.choice(THINGS),
                q=rng.choice(QUALITIES),
                r=rng.choice(QUALITIES),
                when=rng.choice(TIMES),
                where=rng.choice(PLACES),
                n=first,
                m=second,
                k=first + second,
            )
        )
    return texts[:n]
