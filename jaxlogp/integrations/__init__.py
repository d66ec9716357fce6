"""The library inside other people's trainers; each folder needs the extra of its name."""
