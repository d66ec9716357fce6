"""A task of one's own, with nothing but what `Task` asks for."""

from experiments.tasks import Example


class Copying:
    """A task of one's own: write the digit again."""

    name, alphabet, max_prompt_tokens, max_answer_tokens = "copying", "0123456789", 1, 1

    def num_examples(self, split):
        return None

    def example(self, index, split):
        digit = str((2 * index + (split == "held_out")) % 10)
        return Example(digit, digit)

    def verify(self, example, completion):
        return float(completion == example.answer)
