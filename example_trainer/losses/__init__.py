"""Losses as small objects, one family per file; `example_trainer.loss` is their public face.

    registry, choice      names, defaults and contradictions; free of torch
    logprobs, reductions  what every loss needs
    clipped, gspo, cispo, dppo, importance_sampling     one policy loss per algorithm
    corrections, kl, sft, distillation                  what may stand beside it
    training_loss         composes them

Nothing is imported here, so that the settings can read the registry without loading torch.
"""
