"""What makes and checks a release: ``dist`` (wheel and sdist), ``matrix`` (versions), ``release`` (the checklist)."""
