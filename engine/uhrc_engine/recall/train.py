"""Trains the recall model: ``python -m uhrc_engine.recall.train``.

Adam on the answers' cross-entropy, over documents that grow from 64 to 1,024 tokens. 16 minutes
beside other work on two cores; the same seed gives the same data, not the same bits. What it learns
to recall with is the recurrent state alone: without the keys and values of the document it answers
as well.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from safetensors.numpy import save_file

from uhrc_engine.recall.network import CONFIG, Weights, forward, init_weights
from uhrc_engine.recall.task import Case, DocumentShape, accuracy, make_batch, make_cases

BETAS = (0.9, 0.98)
EPSILON = 1e-8
GRADIENT_NORM_MAX = 1.0
WARMUP_STEPS = 200
EVALUATION_SEED = 1_000_000
"""Documents of this seed are never trained on."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the training: so many steps on rows of one size."""

    steps: int
    rows: int
    questions: int
    shape: DocumentShape


STAGES = (
    Stage(800, 16, 12, DocumentShape(64, constants=4, variables=2, assignments=2)),
    Stage(500, 12, 16, DocumentShape(128, constants=8, variables=3)),
    Stage(400, 8, 32, DocumentShape(256)),
    Stage(300, 4, 48, DocumentShape(512)),
    Stage(100, 2, 48, DocumentShape(1024)),
)


def loss_of(weights: Weights, tokens: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean cross-entropy and accuracy where targets >= 0; int32[B, T] both."""
    logits = jax.nn.log_softmax(forward(CONFIG, weights, tokens))
    asked = targets >= 0
    right = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    hits = jnp.argmax(logits, axis=-1) == targets
    count = jnp.sum(asked)
    return -jnp.sum(jnp.where(asked, right, 0)) / count, jnp.sum(hits & asked) / count


@partial(jax.jit, donate_argnums=(0, 1))
def train_step(
    weights: Weights, moments: tuple[Weights, Weights], batch: Any, step: jax.Array, rate: jax.Array
) -> tuple[Weights, tuple[Weights, Weights], jax.Array, jax.Array]:
    """One step of Adam (Kingma and Ba 2015), the gradient's norm clipped; step counts from 1."""
    (loss, hits), gradient = jax.value_and_grad(loss_of, has_aux=True)(weights, *batch)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient)))
    clip = jnp.minimum(1.0, GRADIENT_NORM_MAX / (norm + EPSILON))
    first, second = BETAS
    mean = jax.tree.map(lambda m, g: first * m + (1 - first) * clip * g, moments[0], gradient)
    square = jax.tree.map(
        lambda s, g: second * s + (1 - second) * (clip * g) ** 2, moments[1], gradient
    )
    mean_scale, square_scale = 1 / (1 - first**step), 1 / (1 - second**step)
    weights = jax.tree.map(
        lambda w, m, s: w - rate * m * mean_scale / (jnp.sqrt(s * square_scale) + EPSILON),
        weights,
        mean,
        square,
    )
    return weights, (mean, square), loss, hits


def learning_rate(step: int, steps: int, peak: float) -> float:
    """A linear rise, then half a cosine down to a hundredth."""
    if step < WARMUP_STEPS:
        return peak * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return peak * (0.01 + 0.99 * 0.5 * (1 + np.cos(np.pi * done)))


def greedy_answers(weights: Weights, cases: Sequence[Case], rows: int = 8) -> list[list[int]]:
    """The likeliest token after each prompt; the prompts are of one length."""
    last = jax.jit(lambda weights, tokens: forward(CONFIG, weights, tokens)[:, -1].argmax(axis=-1))
    prompts = np.stack([case.prompt for case in cases])
    parts = [last(weights, prompts[i : i + rows]) for i in range(0, len(prompts), rows)]
    return [[int(token)] for part in parts for token in part]


def train(
    seed: int, peak: float, stages: Sequence[Stage], say: Any = typer.echo
) -> Iterator[Weights]:
    """Runs the stages; yields the weights at the end of each."""
    weights: Weights = jax.tree.map(jnp.asarray, init_weights(CONFIG, seed))
    moments = (jax.tree.map(jnp.zeros_like, weights), jax.tree.map(jnp.zeros_like, weights))
    rng = np.random.default_rng(seed)
    total, step, start = sum(stage.steps for stage in stages), 0, time.perf_counter()
    for stage in stages:
        seen: list[tuple[jax.Array, jax.Array]] = []
        for _ in range(stage.steps):
            batch = make_batch(rng, stage.rows, stage.questions, stage.shape)
            rate = learning_rate(step, total, peak)
            step += 1
            weights, moments, *result = train_step(
                weights, moments, batch, jnp.float32(step), jnp.float32(rate)
            )
            seen.append((result[0], result[1]))
            if step % 50 == 0:
                loss, hits = np.mean([[float(x) for x in pair] for pair in seen[-50:]], axis=0)
                say(
                    f"step {step:5d}  {time.perf_counter() - start:5.0f} s  "
                    f"{stage.shape.tokens} tokens  loss {loss:.4f}  accuracy {hits:.4f}"
                )
        yield weights


def save(folder: Path, weights: Weights) -> None:
    """Writes config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    tensors = {name: np.asarray(value, np.float32) for name, value in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main(
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint.")] = Path("configs/recall"),
    seed: Annotated[int, typer.Option(help="Of the first weights and of the documents.")] = 0,
    rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 3e-3,
) -> None:
    """Train the recall model and measure it on documents it has not seen."""
    for weights in train(seed, rate, STAGES):
        save(out, weights)
        for tokens in (512, 640, 1024):
            cases = make_cases(EVALUATION_SEED, 8, 12, DocumentShape(tokens=tokens))
            share = accuracy(cases, greedy_answers(weights, cases))
            typer.echo(f"held-out documents of {tokens} tokens: {share:.4f} of {len(cases)} right")


if __name__ == "__main__":
    typer.run(main)
