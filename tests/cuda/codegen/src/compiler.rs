//! CubeCL's compiler for CUDA, with a fixed order of what it keeps in hash maps: the same kernel has
//! the same shared memory layout in each process, so NVRTC compiles it once for all of them.

use cubecl_core::ir::{ElemType, StorageType};
use cubecl_core::prelude::KernelDefinition;
use cubecl_cpp::cuda::CudaDialect;
use cubecl_cpp::cuda::mma::CudaWmmaCompiler;
use cubecl_cpp::shared::{CompilationOptions, ComputeKernel, CppCompiler, SharedMemory};
use cubecl_runtime::compiler::{CompilationError, Compiler};
use cubecl_runtime::server::ExecutionMode;

type Dialect = CudaDialect<CudaWmmaCompiler>;

/// Compiler; see the module.
#[derive(Clone, Debug, Default)]
pub struct CudaCompiler(CppCompiler<Dialect>);

impl Compiler for CudaCompiler {
    type Representation = ComputeKernel<Dialect>;
    type CompilationOptions = CompilationOptions;

    fn compile(
        &mut self,
        kernel: KernelDefinition,
        options: &CompilationOptions,
        mode: ExecutionMode,
        address: StorageType,
    ) -> Result<Self::Representation, CompilationError> {
        let mut kernel = self.0.compile(kernel, options, mode, address)?;
        lay_out(&mut kernel.body.shared_memories);
        Ok(kernel)
    }

    fn elem_size(&self, elem: ElemType) -> usize {
        self.0.elem_size(elem)
    }

    fn extension(&self) -> &'static str {
        self.0.extension()
    }
}

/// Lays the memories out as CubeCL does, in the order of their numbers. Memories that overlap, as one
/// is freed before the other is used, keep their places.
fn lay_out(memories: &mut [SharedMemory<Dialect>]) {
    memories.sort_by_key(|memory| memory.offset());
    if memories.windows(2).any(|pair| pair[0].offset() + pair[0].size() > pair[1].offset()) {
        return;
    }
    memories.sort_by_key(|memory| match memory {
        SharedMemory::Array { index, .. } | SharedMemory::Value { index, .. } => *index,
    });
    let mut end = 0_usize;
    for memory in memories {
        let (align, size) = (memory.align(), memory.size());
        let (SharedMemory::Array { offset, .. } | SharedMemory::Value { offset, .. }) = memory;
        *offset = end.next_multiple_of(align);
        end = *offset + size;
    }
}
