"""Rollouts of your own, of several turns: the model guesses a digit, and is told whether the secret is smaller or larger.

    python -m experiments.grpo --source examples.guess_number:rollouts --task comparison:1 --warm-start.max-steps 0 \
        --schedule.row-length 16 --schedule.steps 120 --optimizer.learning-rate 1e-3 --loss.entropy-coefficient 0.02

Task comparison lends its alphabet, "0123456789?<=>", to a model from nothing; the held-out scores are its own. A token
that is told to the model is context, and never a label.
"""

import numpy as np

from experiments import Policy, SamplingOptions
from jaxlogp import Document, Trajectory, group_advantages

GAMES, COPIES, TURNS = 16, 16, 5
ONE_TOKEN = SamplingOptions(max_new_tokens=1)


def rollouts(policy: Policy, step: int) -> list[Document]:
    """Plays games in groups with one secret each; the fewer turns a game takes, the larger its reward."""
    secrets = np.repeat(np.random.default_rng(step).integers(0, 10, GAMES), COPIES)
    games = [Trajectory(policy.tokenizer.encode_prompt("?")) for _ in secrets]
    rewards, playing = np.zeros(len(games), np.float32), list(range(len(games)))
    for turn in range(TURNS):
        drawn = policy.generate([games[number].tokens for number in playing], ONE_TOKEN, seed=(step, turn))
        still = []
        for number, each in zip(playing, drawn, strict=True):
            games[number].add_drawn(each.ids, each.log_probs)
            guess = policy.tokenizer.decode(each.ids)
            if guess == str(secrets[number]):
                rewards[number] = 1.0 - 0.1 * turn
            elif guess.isdecimal():
                hint = "<" if secrets[number] < int(guess) else ">"
                games[number].add_context(policy.tokenizer.encode(hint))
                still.append(number)
        playing = still
    advantages = np.asarray(group_advantages(rewards.reshape(GAMES, COPIES)).advantages).ravel()
    return [
        game.document(advantages=float(advantage), reward=float(reward), versions=policy.version)
        for game, advantage, reward in zip(games, advantages, rewards, strict=True)
    ]
