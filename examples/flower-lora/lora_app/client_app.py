"""The ClientApp: a node whose body is not the server's is refused."""

import fedbcgd.flower
from lora_app.task import load_data, make_model

app = fedbcgd.flower.client_app(lambda context: make_model(str(context.node_config.get("body", ""))), load_data)
