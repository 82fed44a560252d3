"""Lastword: every OpenAI-Responses stream ends with the event that its status asks for."""

__version__ = "0.1.0"
