"""The OpenVINO target: exports plans as stateful IRs and runs them."""
