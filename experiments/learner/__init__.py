"""The learner: what is trained, and the one step that changes it. It knows documents, no task, prompt or reward."""
