"""Finds the CUDA toolkit and NCCL, or says that there is none; the build works either way."""

def _find(repository_ctx):
    for root in [repository_ctx.os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]:
        if root and repository_ctx.path(root + "/bin/nvcc").exists:
            return root
    return ""

def _cuda_configure_impl(repository_ctx):
    root = _find(repository_ctx)
    nccl = bool(root) and repository_ctx.path(root + "/include/nccl.h").exists
    repository_ctx.file("defs.bzl", "\n".join([
        "CUDA_ROOT = %r" % root,
        "HAVE_CUDA = %s" % bool(root),
        "HAVE_NCCL = %s" % nccl,
        "",
    ]))
    linkopts = []
    copts = []
    defines = []
    if root:
        linkopts = ["-L%s/lib64" % root, "-Wl,-rpath,%s/lib64" % root, "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        defines = ["BMUF_HAVE_CUDA=1"]
        repository_ctx.symlink(root + "/include", "include")
    repository_ctx.file("BUILD", """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "cudart",
    hdrs = glob(["include/**/*.h", "include/**/*.hpp"], allow_empty = True),
    includes = ["include"],
    defines = %r,
    linkopts = %r,
)

cc_library(
    name = "nccl",
    defines = %r,
    linkopts = %r,
    deps = [":cudart"],
)
""" % (defines, linkopts, ["BMUF_HAVE_NCCL=1"] if nccl else [], ["-L%s/lib64" % root, "-Wl,-rpath,%s/lib64" % root, "-lnccl"] if nccl else []))

cuda_configure = repository_rule(
    implementation = _cuda_configure_impl,
    environ = ["CUDA_HOME"],
    local = True,
)
