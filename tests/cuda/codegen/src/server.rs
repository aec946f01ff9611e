//! Server of the runtime: a launch generates the kernel, and runs it if execution is on
//! ([`execute`]).
//!
//! [`execute`]: crate::device::execute

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cubecl_common::backtrace::BackTrace;
use cubecl_common::bytes::Bytes;
use cubecl_common::device::{Device, DeviceId, DeviceService};
use cubecl_common::future::DynFut;
use cubecl_common::profile::ProfileDuration;
use cubecl_common::stream_id::StreamId;
use cubecl_core::MemoryConfiguration;
use cubecl_core::ir::MemoryDeviceProperties;
use cubecl_core::zspace::striding::has_pitched_row_major_strides;
use cubecl_cpp::shared::CompilationOptions;
use cubecl_runtime::allocator::PitchedMemoryLayoutPolicy;
use cubecl_runtime::compiler::CubeTask;
use cubecl_runtime::id::KernelId;
use cubecl_runtime::logging::ServerLogger;
use cubecl_runtime::memory_management::{
    ManagedMemoryHandle, MemoryAllocationMode, MemoryManagement, MemoryManagementOptions, MemoryUsage,
};
use cubecl_runtime::server::{
    Binding, ComputeServer, CopyDescriptor, CubeCount, ExecutionMode, KernelArguments, ProfileError, ProfilingToken,
    ServerCommunication, ServerError, ServerUtilities,
};
use cubecl_runtime::storage::ManagedResource;
use cubecl_runtime::timestamp_profiler::TimestampProfiler;
use ptx_interpreter::{Accumulator, Kernel};

use crate::compiler::CudaCompiler;
use crate::fault::{self, Fault};
use crate::launch::Request;
use crate::memory::{ALIGNMENT, OfflineResource, OfflineStorage};
use crate::state::{
    ALLOCATIONS, BYTES, EXECUTION, GENERATED, Generated, IDLE, LAUNCHES, OfflineDevice, UPLOADS, WAITS, options,
    properties,
};

/// CubeCL numbers temporaries with a process-wide counter that each kernel resets, so parallel
/// compilations would reuse names.
static COMPILING: Mutex<()> = Mutex::new(());

/// Parsed kernel of a source, or NVRTC's error, shared by all devices of an architecture.
type Assembled = Arc<OnceLock<Result<Arc<Kernel>, String>>>;

/// Kernels by architecture and source ([`Generated::key`]).
static ASSEMBLED: Mutex<Option<HashMap<(u32, String), Assembled>>> = Mutex::new(None);

/// Server; see the module.
#[derive(Debug)]
pub struct GenerateServer {
    device: OfflineDevice,
    sm: u32,
    memory: MemoryManagement<OfflineStorage>,
    utilities: Arc<ServerUtilities<Self>>,
    options: CompilationOptions,
    profiler: TimestampProfiler,
    /// CUDA source of each kernel, generated at its first launch.
    generated: HashMap<KernelId, Result<Generated, String>>,
    /// Faults that have not been reported.
    errors: Vec<String>,
}

impl GenerateServer {
    fn resource(&mut self, binding: Binding) -> Result<OfflineResource, String> {
        let resource = self.memory.get_resource(binding.memory, binding.offset_start, binding.offset_end);
        resource.map_err(|error| error.to_string())
    }

    /// Returns all unreported faults, for reads and syncs.
    fn take_errors(&mut self) -> Result<(), ServerError> {
        if self.errors.is_empty() {
            return Ok(());
        }
        Err(generic(core::mem::take(&mut self.errors).join("\n")))
    }

    fn kernel(&self, generated: &Generated) -> Result<Arc<Kernel>, String> {
        let key = (self.sm, generated.key());
        let assembled = {
            let mut all = ASSEMBLED.lock().unwrap_or_else(PoisonError::into_inner);
            all.get_or_insert_default().entry(key).or_default().clone()
        };
        let nvrtc = EXECUTION.lock().unwrap().as_ref().map(|execution| execution.nvrtc.clone());
        let nvrtc = nvrtc.ok_or("executions are off")?;
        let assemble = || {
            let ptx = nvrtc.ptx(&generated.source, self.sm)?;
            Kernel::parse(&ptx).map(Arc::new).map_err(|error| error.to_string())
        };
        assembled.get_or_init(assemble).clone()
    }

    /// Generates the CUDA source of a kernel once. The launch sets [`Generated::copies_shapes`].
    fn generate(&mut self, kernel: &dyn CubeTask<CudaCompiler>, mode: ExecutionMode) -> Result<Generated, String> {
        let mut id = kernel.id();
        id.mode(mode);
        if let Some(generated) = self.generated.get(&id) {
            return generated.clone();
        }
        let compiled = {
            let _compiling = COMPILING.lock().unwrap_or_else(PoisonError::into_inner);
            kernel.compile(&mut CudaCompiler::default(), &self.options, mode, kernel.address_type())
        };
        let generated = match compiled {
            Ok(compiled) => Ok(Generated {
                sm: self.sm,
                cache_key: id.stable_hash(),
                name: compiled.entrypoint_name,
                dynamic_shared: compiled.repr.as_ref().map_or(0, |repr| repr.shared_memory_size()),
                source: compiled.source,
                block: [compiled.cube_dim.x, compiled.cube_dim.y, compiled.cube_dim.z],
                copies_shapes: false,
            }),
            Err(error) => Err(format!("{} for sm_{}: {error}", kernel.name(), self.sm)),
        };
        self.generated.insert(id, generated.clone());
        generated
    }

    /// Runs a launch.
    fn execute(
        &mut self,
        generated: &Generated,
        count: CubeCount,
        arguments: KernelArguments,
        (seed, accumulator): (u64, Accumulator),
        fault: Option<Fault>,
    ) -> Result<(), String> {
        let grid = match count {
            CubeCount::Static(x, y, z) => [x, y, z],
            CubeCount::Dynamic(binding) => {
                let resource = self.resource(binding)?;
                // SAFETY: the reference ends here.
                let words =
                    unsafe { resource.bytes() }.chunks_exact(4).map(|word| word.try_into().expect("four bytes"));
                let words: Vec<u32> = words.map(u32::from_le_bytes).collect();
                [words[0], words[1], words[2]]
            }
        };
        let kernel = self.kernel(generated)?;
        let (block, dynamic_shared) = (generated.block, generated.dynamic_shared);
        let read = match fault {
            Some(Fault::Read(argument, change)) => Some((argument, change)),
            _ => None,
        };
        let request = Request { kernel: &kernel, grid, block, dynamic_shared, seed, accumulator, read };
        request.run(&mut |binding| self.resource(binding), arguments)
    }
}

fn generic(reason: String) -> ServerError {
    ServerError::Generic { reason, backtrace: BackTrace::capture() }
}

/// Dense rows of a pitched tensor: bytes of a row, bytes between rows, and number of rows.
fn rows(descriptor: &CopyDescriptor) -> [usize; 3] {
    let (shape, strides) = (&descriptor.shape, &descriptor.strides);
    let rank = shape.len();
    let width = shape.last().copied().unwrap_or(1) * descriptor.elem_size;
    if rank < 2 {
        return [width, width, 1];
    }
    [width, strides[rank - 2] * descriptor.elem_size, shape[..rank - 1].iter().product()]
}

impl DeviceService for GenerateServer {
    fn init(id: DeviceId) -> Self {
        let device = OfflineDevice::from_id(id);
        let sm = u32::from(device.sm);
        let logger = Arc::new(ServerLogger::default());
        let memory = MemoryManagement::from_configuration(
            OfflineStorage::default(),
            &MemoryDeviceProperties { max_page_size: 64 << 30, alignment: ALIGNMENT as u64 },
            MemoryConfiguration::default(),
            logger.clone(),
            MemoryManagementOptions::new("codegen"),
        );
        let policy = PitchedMemoryLayoutPolicy::new(512);
        let utilities = Arc::new(ServerUtilities::new(properties(&device), logger, (), policy));
        Self {
            device,
            sm,
            memory,
            utilities,
            options: options(sm),
            profiler: TimestampProfiler::default(),
            generated: HashMap::new(),
            errors: vec![],
        }
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
    type Storage = OfflineStorage;
    type MemoryLayoutPolicy = PitchedMemoryLayoutPolicy;
    type Info = ();

    fn logger(&self) -> Arc<ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities<Self>> {
        self.utilities.clone()
    }

    fn initialize_memory(&mut self, memory: ManagedMemoryHandle, size: u64, _: StreamId) {
        ALLOCATIONS.fetch_add(1, Relaxed);
        let reserved = self.memory.reserve(size).expect("there is as much as asked for");
        self.memory.bind(reserved, memory.clone(), 0).expect("just reserved");
        if EXECUTION.lock().unwrap().is_some() {
            let resource = self.memory.get_resource(memory.binding(), None, None).expect("just bound");
            // SAFETY: the reference ends here. Fresh memory is poison: all NaN.
            unsafe { resource.bytes() }.fill(0xff);
        }
    }

    fn read(&mut self, descriptors: Vec<CopyDescriptor>, _: StreamId) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        WAITS.fetch_add(1, Relaxed);
        let mut result = self.take_errors().map(|()| vec![]);
        for descriptor in descriptors {
            if !has_pitched_row_major_strides(&descriptor.shape, &descriptor.strides) {
                result = Err(generic(format!("strides {:?} cannot be read", descriptor.strides)));
                continue;
            }
            let [width, pitch, count] = rows(&descriptor);
            let mut data = vec![0; width * count];
            match (self.resource(descriptor.handle), &mut result) {
                (Ok(resource), Ok(all)) => {
                    // SAFETY: the reference ends here.
                    let bytes = unsafe { resource.bytes() };
                    for (i, row) in data.chunks_mut(width.max(1)).enumerate() {
                        row.copy_from_slice(&bytes[i * pitch..i * pitch + width]);
                    }
                    all.push(Bytes::from_bytes_vec(data));
                }
                (Err(error), Ok(_)) => result = Err(generic(error)),
                _ => {}
            }
        }
        Box::pin(async move { result })
    }

    fn write(&mut self, descriptors: Vec<(CopyDescriptor, Bytes)>, _: StreamId) {
        UPLOADS.fetch_add(descriptors.len(), Relaxed);
        if EXECUTION.lock().unwrap().is_none() {
            return;
        }
        for (descriptor, data) in descriptors {
            let [width, pitch, _] = rows(&descriptor);
            match self.resource(descriptor.handle) {
                Ok(resource) => {
                    // SAFETY: the reference ends here.
                    let bytes = unsafe { resource.bytes() };
                    for (i, row) in data.chunks(width.max(1)).enumerate() {
                        bytes[i * pitch..i * pitch + row.len()].copy_from_slice(row);
                    }
                }
                Err(error) => self.errors.push(error),
            }
        }
    }

    fn sync(&mut self, _: StreamId) -> DynFut<Result<(), ServerError>> {
        WAITS.fetch_add(1, Relaxed);
        let result = self.take_errors();
        Box::pin(async { result })
    }

    fn get_resource(&mut self, binding: Binding, _: StreamId) -> Result<ManagedResource<OfflineResource>, ServerError> {
        let resource = self.memory.get_resource(binding.memory.clone(), binding.offset_start, binding.offset_end)?;
        Ok(ManagedResource::new(binding.memory, resource))
    }

    unsafe fn launch(
        &mut self,
        kernel: Self::Kernel,
        count: CubeCount,
        arguments: KernelArguments,
        mode: ExecutionMode,
        _: StreamId,
    ) {
        if IDLE.load(Relaxed) {
            LAUNCHES.fetch_add(1, Relaxed);
            let maps = arguments.tensor_maps.iter().map(|map| &map.binding);
            let bytes = arguments.buffers.iter().chain(maps).map(Binding::size_in_used).sum();
            BYTES.fetch_add(bytes, Relaxed);
            return;
        }
        let generated = self.generate(&*kernel, mode);
        let fault = generated.as_ref().ok().and_then(|generated| fault::of(&self.device, &generated.name));
        // All these architectures pass arguments by value.
        let copies_shapes = arguments.info.dynamic_metadata_offset < arguments.info.data.len();
        let generated = generated.map(|generated| Generated { copies_shapes, ..generated });
        let generated = generated.and_then(|generated| match fault {
            Some(Fault::Refuse) => Err(format!("{} does not compile", generated.name)),
            Some(Fault::Edit(from, to)) => Ok(Generated { source: generated.source.replace(from, to), ..generated }),
            _ => Ok(generated),
        });
        match fault {
            Some(Fault::Drop) => return,
            Some(Fault::Panic(message)) => panic!("{message}"),
            _ => {}
        }
        let how = EXECUTION.lock().unwrap().as_ref().map(|execution| (execution.seed, execution.accumulator));
        let Some(how) = how else {
            GENERATED.lock().unwrap().push(generated);
            return;
        };
        if let (Ok(generated), Some(execution)) = (&generated, EXECUTION.lock().unwrap().as_mut()) {
            *execution.launches.entry(generated.source.clone()).or_default() += 1;
        }
        let done = generated.and_then(|generated| self.execute(&generated, count, arguments, how, fault));
        if let Err(error) = done {
            self.errors.push(error);
        }
    }

    fn flush(&mut self, _: StreamId) -> Result<(), ServerError> {
        self.take_errors()
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
