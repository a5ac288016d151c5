"""Train with a bmuf-coordinator from PyTorch or from numpy.

    import bmuf

    with bmuf.join("dns:///coordinator:7070", job="lm", worker="node3", model=model, optimizer=optimizer) as w:
        for batch in loader:
            loss = train_step(batch)
            w.step(samples=len(batch), loss=float(loss))   # at a block's end: push, wait, load the new model
            if w.done:
                break

`join` makes the model the global one before it returns. `step` counts local steps; at the end of a block it pushes the
block delta (local minus broadcast, ascent sign), waits for the round and loads the new model in place. Only permanent
errors reach the loop, as `bmuf.Error` with a `reason` from errors.proto.
"""

from bmuf.errors import Error
from bmuf.session import Session, join

__all__ = ["Error", "Session", "join"]
