#!/usr/bin/python3
"""Print the packets of a Perfetto trace as JSON, read by the schema that Perfetto publishes.

usage: decode.py SCHEMA TRACE...

SCHEMA is a compiled one (scripts/perfetto-schema). Several traces are read as
one, as cat would make of them. A field that the schema does not have is an error.
"""

import json
import sys

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory


def main(schema, *traces):
    pool = descriptor_pool.DescriptorPool()
    with open(schema, "rb") as file:
        for described in descriptor_pb2.FileDescriptorSet.FromString(file.read()).file:
            pool.AddSerializedFile(described.SerializeToString())
    described = pool.FindMessageTypeByName("perfetto.protos.Trace")
    if hasattr(message_factory, "GetMessageClass"):
        message = message_factory.GetMessageClass(described)
    else:
        message = message_factory.MessageFactory(pool).GetPrototype(described)
    data = b""
    for path in traces:
        with open(path, "rb") as file:
            data += file.read()
    trace = message.FromString(data)
    trace.DiscardUnknownFields()
    if trace.ByteSize() != len(data):
        sys.exit("the trace has fields that the schema does not have")
    packets = json_format.MessageToDict(trace, preserving_proto_field_name=True)
    json.dump(packets.get("packet", []), sys.stdout)


main(*sys.argv[1:])
