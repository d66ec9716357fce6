"""Your own reward: half a point for a sum whose last digit is right. Run: python -m examples.own_reward"""

from experiments import Config, train


def reward(example, completion):
    """1.0 for the right answer, 0.5 for its last digit."""
    if completion == example.answer:
        return 1.0
    return 0.5 * completion.endswith(example.answer[-1])


if __name__ == "__main__":
    train(Config(task="addition"), reward=reward)
