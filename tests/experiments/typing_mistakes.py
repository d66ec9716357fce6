"""Mistakes of users that the type checker has to report: it fails where an ignored error is none."""

from experiments import Config, train


def mistakes():
    Config(taks="addition")  # ty: ignore[unknown-argument]
    train(Config(), rewards=len)  # ty: ignore[unknown-argument]
