"""The C declarations of UCX that we use.

They agree with the headers of UCX 1.18 to 1.22 (a test compares every offset and number), and were run against the
libraries of 1.18 to 1.23. UCX promises that its structures only grow at the end and that a field is looked at only when
its bit in ``field_mask`` is set, so each structure here is a prefix of UCX's with a spare tail. Three liberties, all of
them the same to the C calling convention:

1. Handles and addresses that pass through in numbers are declared ``uintptr_t``, so that a Python ``int`` needs no
   cast. Only ``ucp_get_nbx`` takes pointers throughout: cffi passes a pointer on as it is, and takes 30 ns to make a
   machine word of an ``int``, five times a get.
2. Enumerations are ``int`` (``ucs_status_t`` is one signed byte, so it is ``signed char``).
3. ``FILE *`` is ``void *``.
"""

from __future__ import annotations

CDEF = """
typedef signed char ucs_status_t;

typedef struct {
    uint64_t field_mask;
    uint64_t features;
    size_t request_size;
    void *request_init;
    void *request_cleanup;
    uint64_t tag_sender_mask;
    int mt_workers_shared;
    size_t estimated_num_eps;
    size_t estimated_num_ppn;
    const char *name;
    char spare[256];
} ucp_params_t;

typedef struct {
    uint64_t field_mask;
    int thread_mode;
    unsigned long cpu_mask[16];
    unsigned events;
    void *user_data;
    int event_fd;
    uint64_t flags;
    const char *name;
    size_t am_alignment;
    uint64_t client_id;
    char spare[256];
} ucp_worker_params_t;

typedef struct {
    uint64_t field_mask;
    void *address;
    size_t length;
    unsigned flags;
    unsigned prot;
    int memory_type;
    const void *exported_memh_buffer;
    char spare[256];
} ucp_mem_map_params_t;

typedef void (*ucp_err_handler_cb_t)(void *arg, uintptr_t ep, ucs_status_t status);

typedef struct {
    uint64_t field_mask;
    const void *address;
    int err_mode;
    ucp_err_handler_cb_t err_handler_cb;
    void *err_handler_arg;
    void *user_data;
    unsigned flags;
    char spare[256];
} ucp_ep_params_t;

typedef struct {
    uint32_t op_attr_mask;
    uint32_t flags;
    void *request;
    void *cb;
    uint64_t datatype;
    void *user_data;
    void *reply_buffer;
    int memory_type;
    void *recv_info;
    uintptr_t memh;
    char spare[256];
} ucp_request_param_t;

typedef struct {
    uint64_t recv_attr;
    uintptr_t reply_ep;
} ucp_am_recv_param_t;

typedef struct {
    void *buffer;
    size_t length;
} ucp_dt_iov_t;

typedef ucs_status_t (*ucp_am_recv_callback_t)(void *arg, const void *header, size_t header_length, void *data,
                                               size_t length, const ucp_am_recv_param_t *param);

typedef struct {
    uint64_t field_mask;
    unsigned id;
    uint32_t flags;
    ucp_am_recv_callback_t cb;
    void *arg;
    char spare[256];
} ucp_am_handler_param_t;

typedef struct {
    uint64_t field_mask;
    size_t request_size;
    int thread_mode;
    uint64_t memory_types;
    char name[32];
    char spare[256];
} ucp_context_attr_t;

typedef struct {
    const char *transport_name;
    const char *device_name;
} ucp_transport_entry_t;

typedef struct {
    uint64_t field_mask;
    char name[32];
    char local_sockaddr[128];
    char remote_sockaddr[128];
    ucp_transport_entry_t *transport_entries;
    unsigned num_transport_entries;
    size_t transport_entry_size;
    void *user_data;
    char spare[256];
} ucp_ep_attr_t;

void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release);
const char *ucp_get_version_string(void);

ucs_status_t ucp_config_read(const char *env_prefix, const char *filename, uintptr_t *config);
ucs_status_t ucp_config_modify(uintptr_t config, const char *name, const char *value);
void ucp_config_release(uintptr_t config);

ucs_status_t ucp_init_version(unsigned major, unsigned minor, const ucp_params_t *params, uintptr_t config,
                              uintptr_t *context);
void ucp_cleanup(uintptr_t context);
ucs_status_t ucp_context_query(uintptr_t context, ucp_context_attr_t *attr);
void ucp_context_print_info(uintptr_t context, void *stream);

ucs_status_t ucp_mem_map(uintptr_t context, const ucp_mem_map_params_t *params, uintptr_t *memh);
ucs_status_t ucp_mem_unmap(uintptr_t context, uintptr_t memh);
ucs_status_t ucp_rkey_pack(uintptr_t context, uintptr_t memh, void **buffer, size_t *size);
void ucp_rkey_buffer_release(void *buffer);

ucs_status_t ucp_worker_create(uintptr_t context, const ucp_worker_params_t *params, uintptr_t *worker);
void ucp_worker_destroy(uintptr_t worker);
ucs_status_t ucp_worker_get_address(uintptr_t worker, void **address, size_t *length);
void ucp_worker_release_address(uintptr_t worker, void *address);
ucs_status_t ucp_worker_get_efd(uintptr_t worker, int *fd);
ucs_status_t ucp_worker_arm(uintptr_t worker);
unsigned ucp_worker_progress(uintptr_t worker);

ucs_status_t ucp_ep_create(uintptr_t worker, const ucp_ep_params_t *params, uintptr_t *ep);
uintptr_t ucp_ep_close_nbx(uintptr_t ep, const ucp_request_param_t *param);
ucs_status_t ucp_ep_query(uintptr_t ep, ucp_ep_attr_t *attr);
void ucp_ep_print_info(uintptr_t ep, void *stream);
uintptr_t ucp_worker_flush_nbx(uintptr_t worker, const ucp_request_param_t *param);
ucs_status_t ucp_ep_rkey_unpack(uintptr_t ep, const void *buffer, uintptr_t *rkey);
void ucp_rkey_destroy(uintptr_t rkey);

uintptr_t ucp_get_nbx(void *ep, void *buffer, size_t count, void *remote_addr, void *rkey, void *param);
ucs_status_t ucp_worker_set_am_recv_handler(uintptr_t worker, const ucp_am_handler_param_t *param);
uintptr_t ucp_am_send_nbx(uintptr_t ep, unsigned id, const void *header, size_t header_length, const void *buffer,
                          size_t count, const ucp_request_param_t *param);
uintptr_t ucp_tag_send_nbx(uintptr_t ep, const void *buffer, size_t count, uint64_t tag,
                           const ucp_request_param_t *param);
uintptr_t ucp_tag_recv_nbx(uintptr_t worker, void *buffer, size_t count, uint64_t tag, uint64_t tag_mask,
                           const ucp_request_param_t *param);
ucs_status_t ucp_request_check_status(uintptr_t request);
void ucp_request_free(uintptr_t request);
const char *ucs_status_string(ucs_status_t status);

void *memset(void *at, int byte, size_t n);
int msync(void *at, size_t n, int flags);
void *open_memstream(char **text, size_t *size);
int fclose(void *stream);
void free(void *at);
"""

# ucp_params_t
PARAM_FIELD_FEATURES = 1 << 0
PARAM_FIELD_MT_WORKERS_SHARED = 1 << 5
PARAM_FIELD_NAME = 1 << 8
FEATURE_TAG = 1 << 0
FEATURE_RMA = 1 << 1
FEATURE_WAKEUP = 1 << 4
FEATURE_AM = 1 << 6

# ucp_worker_params_t
WORKER_FIELD_THREAD_MODE = 1 << 0
WORKER_FIELD_FLAGS = 1 << 5
WORKER_FIELD_NAME = 1 << 6
WORKER_FLAG_IGNORE_REQUEST_LEAK = 1 << 0
THREAD_MODE_SERIALIZED = 1

# ucp_ep_params_t
EP_FIELD_REMOTE_ADDRESS = 1 << 0
EP_FIELD_ERR_HANDLING_MODE = 1 << 1
EP_FIELD_ERR_HANDLER = 1 << 2
ERR_HANDLING_MODE_PEER = 1
EP_CLOSE_FLAG_FORCE = 1 << 0

# ucp_mem_map_params_t
MEM_MAP_FIELD_ADDRESS = 1 << 0
MEM_MAP_FIELD_LENGTH = 1 << 1
MEM_MAP_FIELD_PROT = 1 << 3
MEM_MAP_FIELD_MEMORY_TYPE = 1 << 4
MEM_PROT_LOCAL_READ = 1 << 0
MEM_PROT_LOCAL_WRITE = 1 << 1
MEM_PROT_REMOTE_READ = 1 << 8
MEMORY_TYPE_HOST = 0
MEMORY_TYPE_CUDA = 1

# ucp_request_param_t
OP_FIELD_REQUEST = 1 << 0
OP_FIELD_CALLBACK = 1 << 1
OP_FIELD_USER_DATA = 1 << 2
OP_FIELD_DATATYPE = 1 << 3
OP_FIELD_FLAGS = 1 << 4
OP_FIELD_MEMORY_TYPE = 1 << 6
OP_FIELD_MEMH = 1 << 8
OP_FLAG_FAST_CMPL = 1 << 17

# Active messages
AM_HANDLER_FIELD_ID = 1 << 0
AM_HANDLER_FIELD_CB = 1 << 2
AM_HANDLER_FIELD_ARG = 1 << 3
AM_SEND_FLAG_REPLY = 1 << 0
AM_SEND_FLAG_EAGER = 1 << 1
AM_SEND_FLAG_COPY_HEADER = 1 << 3
AM_RECV_ATTR_FIELD_REPLY_EP = 1 << 0
AM_RECV_ATTR_FLAG_RNDV = 1 << 17

# ucp_datatype_t
DATATYPE_IOV = 2

# ucp_context_attr_t, ucp_ep_attr_t
ATTR_FIELD_REQUEST_SIZE = 1 << 0
ATTR_FIELD_THREAD_MODE = 1 << 1
ATTR_FIELD_MEMORY_TYPES = 1 << 2
EP_ATTR_FIELD_TRANSPORTS = 1 << 3

# ucs_status_t
OK = 0
INPROGRESS = 1
ERR_IO_ERROR = -3
ERR_BUSY = -15
ERR_CANCELED = -16
ERR_LAST = -100

API_VERSION = (1, 18)
"""What we tell ``ucp_init_version``: the oldest UCX whose fields we use."""

OLDEST = API_VERSION
NEWEST_TRIED = (1, 23)
