"""Questions about a training that need no training: its memory, its trade-off, its smallest budget, its largest batch.

`print(rematch.memory(model, batch))`

Each answer is data: it prints itself as text, `to_data()` is what JSON can say, and `plot(path)` draws it. All of them
take the name of a device that is not here, such as `device="h200"`.
"""
