"""Talking to vLLM: one fixed origin, nothing invented, errors told apart."""
