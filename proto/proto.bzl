"""C++ libraries from .proto files with Debian's protoc and gRPC plugin."""

def cc_proto(name, srcs, root, imports = [], deps = [], grpc = False, visibility = None):
    """Generates and compiles C++ for .proto files.

    Args:
      name: the cc_library.
      srcs: the .proto files of this package.
      root: the import root, relative to the workspace.
      imports: filegroups with imported .proto files.
      deps: libraries of the imported protos.
      grpc: also generate the service stubs.
      visibility: as in cc_library.
    """
    headers = []
    sources = []
    suffixes = [".pb"] + ([".grpc.pb"] if grpc else [])
    for src in srcs:
        for suffix in suffixes:
            headers.append(src[:-len(".proto")] + suffix + ".h")
            sources.append(src[:-len(".proto")] + suffix + ".cc")
    out = "$(BINDIR)/" + root
    native.genrule(
        name = name + "_generated",
        srcs = srcs + imports,
        outs = headers + sources,
        cmd = "/usr/bin/protoc -I%s -Ithird_party/googleapis -I/usr/include --cpp_out=%s %s %s" % (
            root,
            out,
            "--grpc_out=%s --plugin=protoc-gen-grpc=/usr/bin/grpc_cpp_plugin" % out if grpc else "",
            " ".join(["$(location %s)" % s for s in srcs]),
        ),
    )
    native.cc_library(
        name = name,
        srcs = sources,
        hdrs = headers,
        strip_include_prefix = "/" + root,
        copts = ["-w"],
        deps = deps + ["//third_party:grpc" if grpc else "//third_party:protobuf"],
        visibility = visibility,
    )
