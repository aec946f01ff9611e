//! The server behind the runtime: memory is only accounted for, a launch generates the kernel, reads give zeros.

use std::any::Any;
use std::sync::Arc;

use cubecl_common::bytes::Bytes;
use cubecl_common::device::{DeviceId, DeviceService};
use cubecl_common::future::DynFut;
use cubecl_common::profile::ProfileDuration;
use cubecl_common::stream_id::StreamId;
use cubecl_core::MemoryConfiguration;
use cubecl_core::ir::MemoryDeviceProperties;
use cubecl_cpp::shared::CompilationOptions;
use cubecl_runtime::allocator::PitchedMemoryLayoutPolicy;
use cubecl_runtime::compiler::CubeTask;
use cubecl_runtime::logging::ServerLogger;
use cubecl_runtime::memory_management::{
    ManagedMemoryHandle, MemoryAllocationMode, MemoryManagement, MemoryManagementOptions, MemoryUsage,
};
use cubecl_runtime::server::{
    Binding, ComputeServer, CopyDescriptor, CubeCount, ExecutionMode, IoError, KernelArguments, ProfileError,
    ProfilingToken, ServerCommunication, ServerError, ServerUtilities,
};
use cubecl_runtime::storage::{ComputeStorage, ManagedResource, StorageHandle, StorageId, StorageUtilization};
use cubecl_runtime::timestamp_profiler::TimestampProfiler;

use crate::device::{CudaCompiler, GENERATED, Generated, options, properties};

/// Memory of any size that nobody reads or writes.
#[derive(Debug, Default)]
pub struct PaperStorage;

impl ComputeStorage for PaperStorage {
    type Resource = StorageHandle;

    fn alignment(&self) -> usize {
        512
    }

    fn get(&mut self, handle: &StorageHandle) -> StorageHandle {
        handle.clone()
    }

    fn alloc(&mut self, size: u64) -> Result<StorageHandle, IoError> {
        Ok(StorageHandle::new(StorageId::new(), StorageUtilization { offset: 0, size }))
    }

    fn dealloc(&mut self, _: StorageId) {}

    fn flush(&mut self) {}
}

/// See the module.
#[derive(Debug)]
pub struct GenerateServer {
    sm: u32,
    memory: MemoryManagement<PaperStorage>,
    utilities: Arc<ServerUtilities<Self>>,
    options: CompilationOptions,
    profiler: TimestampProfiler,
}

impl DeviceService for GenerateServer {
    fn init(id: DeviceId) -> Self {
        let sm = u32::from(id.index_id);
        let logger = Arc::new(ServerLogger::default());
        let memory = MemoryManagement::from_configuration(
            PaperStorage,
            &MemoryDeviceProperties { max_page_size: 64 << 30, alignment: 512 },
            MemoryConfiguration::default(),
            logger.clone(),
            MemoryManagementOptions::new("codegen"),
        );
        let policy = PitchedMemoryLayoutPolicy::new(512);
        let utilities = Arc::new(ServerUtilities::new(properties(sm), logger, (), policy));
        Self { sm, memory, utilities, options: options(sm), profiler: TimestampProfiler::default() }
    }

    fn utilities(&self) -> Arc<dyn Any + Send + Sync> {
        self.utilities.clone()
    }
}

impl ServerCommunication for GenerateServer {
    const SERVER_COMM_ENABLED: bool = false;
}

impl ComputeServer for GenerateServer {
    type Kernel = Box<dyn CubeTask<CudaCompiler>>;
    type Storage = PaperStorage;
    type MemoryLayoutPolicy = PitchedMemoryLayoutPolicy;
    type Info = ();

    fn logger(&self) -> Arc<ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities<Self>> {
        self.utilities.clone()
    }

    fn initialize_memory(&mut self, memory: ManagedMemoryHandle, size: u64, _: StreamId) {
        let reserved = self.memory.reserve(size).expect("there is as much as asked for");
        self.memory.bind(reserved, memory, 0).expect("just reserved");
    }

    fn read(&mut self, descriptors: Vec<CopyDescriptor>, _: StreamId) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        let zeros = |d: CopyDescriptor| Bytes::from_bytes_vec(vec![0; d.handle.size_in_used() as usize]);
        Box::pin(async move { Ok(descriptors.into_iter().map(zeros).collect()) })
    }

    fn write(&mut self, _: Vec<(CopyDescriptor, Bytes)>, _: StreamId) {}

    fn sync(&mut self, _: StreamId) -> DynFut<Result<(), ServerError>> {
        Box::pin(async { Ok(()) })
    }

    fn get_resource(&mut self, binding: Binding, _: StreamId) -> Result<ManagedResource<StorageHandle>, ServerError> {
        let resource = self.memory.get_resource(binding.memory.clone(), binding.offset_start, binding.offset_end)?;
        Ok(ManagedResource::new(binding.memory, resource))
    }

    unsafe fn launch(
        &mut self,
        kernel: Self::Kernel,
        _: CubeCount,
        _: KernelArguments,
        mode: ExecutionMode,
        _: StreamId,
    ) {
        let compiled = kernel.compile(&mut CudaCompiler::default(), &self.options, mode, kernel.address_type());
        let generated = match compiled {
            Ok(compiled) => Ok(Generated {
                sm: self.sm,
                name: compiled.entrypoint_name,
                dynamic_shared: compiled.repr.as_ref().map_or(0, |repr| repr.shared_memory_size()),
                source: compiled.source,
                threads: compiled.cube_dim.x * compiled.cube_dim.y * compiled.cube_dim.z,
            }),
            Err(error) => Err(format!("{} for sm_{}: {error}", kernel.name(), self.sm)),
        };
        GENERATED.lock().unwrap().push(generated);
    }

    fn flush(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn memory_usage(&mut self, _: StreamId) -> Result<MemoryUsage, ServerError> {
        Ok(self.memory.memory_usage())
    }

    fn memory_cleanup(&mut self, _: StreamId) {}

    fn start_profile(&mut self, _: StreamId) -> Result<ProfilingToken, ServerError> {
        Ok(self.profiler.start())
    }

    fn end_profile(&mut self, _: StreamId, token: ProfilingToken) -> Result<ProfileDuration, ProfileError> {
        self.profiler.stop(token)
    }

    fn allocation_mode(&mut self, mode: MemoryAllocationMode, _: StreamId) {
        self.memory.mode(mode);
    }
}
