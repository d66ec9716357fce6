"""Completions of a model for tests, by the sampler of a run."""

from flax import nnx

from experiments.models.mesh import MeshSpec, make_mesh
from experiments.sampling.decoder_sampler import DecoderSampler
from experiments.sampling.options import SamplingOptions
from experiments.sampling.sample_token import CompletionRule
from experiments.sampling.sampler import SampledModel


def rule(max_new_tokens, *, eos_ids=(), pad_id=0, temperature=1.0, **options):
    return CompletionRule(SamplingOptions(max_new_tokens, temperature, **options), eos_ids, pad_id)


def sample(model, prompts, lengths, key, rule, *, copies=1):
    graph, params = nnx.split(model)
    mesh = make_mesh(MeshSpec()) if model.mesh is None else model.mesh
    return DecoderSampler(SampledModel(graph, mesh), rule)(params, prompts, lengths, copies, key)
