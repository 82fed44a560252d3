"""What a vLLM gets wrong, asked of it with real requests: ``lastword check``.

``questions`` is the catalogue; ``foreground``, ``late_error``, ``background`` and ``cancelling``
ask; ``stream_rules`` judges what a stream says on its way; ``server`` talks HTTP and cleans up;
``runner`` goes through it all; ``table`` and ``as_json`` show the ``report``.
"""
