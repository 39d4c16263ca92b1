# conan create . --build=missing
#
# CUDA and CCCL are the system's: the package holds headers, which a project with CUDA compiles with
# its own toolkit.

import os
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.files import copy, load, save


class KvpolicyConan(ConanFile):
    name = "kvpolicy"
    description = "Header-only C++20 library for KV-cache policies"
    license = "Apache-2.0"
    topics = ("kv-cache", "transformer", "inference", "cuda", "header-only")
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    exports_sources = "include/*", "cmake/nvcc.cmake", "LICENSE"
    no_copy_source = True
    test_package_folder = os.path.join("packaging", "test_package")

    def set_version(self):
        text = load(self, os.path.join(self.recipe_folder, "include", "kvpolicy", "version.hpp"))
        parts = [re.search(rf"^#define KVPOLICY_VERSION_{part} (\d+)$", text, re.MULTILINE).group(1)
                 for part in ("MAJOR", "MINOR", "PATCH")]
        self.version = ".".join(parts)

    def validate(self):
        check_min_cppstd(self, 20)

    def package_id(self):
        self.info.clear()

    # Where the generated target gets nvcc's flag from: CMakeDeps hands on flags for C and C++ only.
    @property
    def _nvcc_module(self):
        return os.path.join("share", "kvpolicy", "nvcc_of_target.cmake")

    def package(self):
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        copy(self, "*", os.path.join(self.source_folder, "include"),
             os.path.join(self.package_folder, "include"))
        copy(self, "nvcc.cmake", os.path.join(self.source_folder, "cmake"),
             os.path.join(self.package_folder, "share", "kvpolicy"))
        save(self, os.path.join(self.package_folder, self._nvcc_module),
             "include(${CMAKE_CURRENT_LIST_DIR}/nvcc.cmake)\n"
             "target_compile_options(kvpolicy::kvpolicy INTERFACE ${kvpolicy_nvcc_options})\n")

    def package_info(self):
        self.cpp_info.set_property("cmake_file_name", "kvpolicy")
        self.cpp_info.set_property("cmake_target_name", "kvpolicy::kvpolicy")
        # As the installed version file: the same minor version while the major version is 0.
        self.cpp_info.set_property("cmake_config_version_compat", "SameMinorVersion")
        self.cpp_info.set_property("cmake_build_modules", [self._nvcc_module])
        self.cpp_info.set_property("pkg_config_name", "kvpolicy")
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
        if self.settings.get_safe("os") in ("Linux", "FreeBSD"):
            self.cpp_info.system_libs = ["pthread"]
